// The work list and the workspace's size, over random problems.

#include "native/plan/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "native/testing/check.h"
#include "native/testing/random.h"

namespace flashverify {
namespace {

using testing::Random;

constexpr fv_route kRoutes[] = {FV_ROUTE_GROUPED_FP32, FV_ROUTE_SCALAR_FP32, FV_ROUTE_GROUPED_HALF,
                                FV_ROUTE_SCALAR_HALF, FV_ROUTE_XQA_HALF};

// Grows with each argument, as the real one does.
size_t scratch_bytes(int64_t unit_rows, int64_t head_dim, int64_t tree_depth) {
  return static_cast<size_t>(unit_rows * head_dim * (tree_depth + 1)) * sizeof(float) + 1;
}

// A problem with the arrays that planning reads.
struct Case {
  AttentionProblem problem;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> query_start_loc;
  int num_threads = 1;

  void set_requests(const std::vector<int64_t>& query_lens, const std::vector<int64_t>& lengths) {
    query_start_loc = {0};
    seq_lens.clear();
    for (size_t i = 0; i < lengths.size(); ++i) {
      query_start_loc.push_back(query_start_loc.back() + static_cast<int32_t>(query_lens[i]));
      seq_lens.push_back(static_cast<int32_t>(lengths[i]));
    }
    problem.batch = static_cast<int64_t>(lengths.size());
    problem.rows = query_start_loc.back();
    problem.query_start_loc = query_start_loc.data();
    problem.seq_lens = seq_lens.data();
  }
};

int64_t random_length(Random& random) {
  switch (random.integer(0, 3)) {
    case 0:
      return random.integer(0, 70);
    case 1:  // about a split's boundary
      return std::max<int64_t>(0, kSplitTokens * random.integer(0, 40) + random.integer(-9, 9));
    case 2:
      return random.integer(0, 10000);
    default:
      return random.integer(0, 300000);
  }
}

void fill_random(Case& test, Random& random) {
  AttentionProblem& problem = test.problem;
  problem.route = kRoutes[random.integer(0, 4)];
  problem.kv_heads = random.pick<int64_t>({1, 1, 2, 3, 8, 32});
  problem.q_heads = problem.kv_heads * random.pick<int64_t>({1, 2, 5, 6, 8, 16, 71});
  problem.head_dim = random.pick<int64_t>({1, 64, 80, 128, 256, 512});
  problem.page_size = random.pick<int64_t>({1, 16, 1568});
  problem.causal = random.chance(70);
  problem.window = random.chance(60) ? 0 : random.integer(1, random.chance(50) ? 100 : 20000);
  test.num_threads = static_cast<int>(random.integer(1, 16));

  const int64_t batch = random.chance(10) ? random.integer(20, 60) : random.integer(0, 6);
  const int64_t common_len = random.integer(0, 16);
  const bool equal_blocks = batch > 0 && random.chance(20);
  std::vector<int64_t> query_lens, lengths;
  for (int64_t i = 0; i < batch; ++i) {
    query_lens.push_back(equal_blocks        ? common_len
                         : random.chance(15) ? 0
                                             : random.integer(1, random.chance(50) ? 8 : 64));
    lengths.push_back(random_length(random));
  }
  test.set_requests(query_lens, lengths);
  if (equal_blocks) problem.query_start_loc = nullptr;
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  problem.max_pages = ceil_div(longest, problem.page_size);
}

std::string describe(const Case& test) {
  const AttentionProblem& p = test.problem;
  std::string text = "route " + std::to_string(p.route) + ", " + std::to_string(p.q_heads) + "/" +
                     std::to_string(p.kv_heads) + " heads, causal " + std::to_string(p.causal) +
                     ", window " + std::to_string(p.window) + ", threads " +
                     std::to_string(test.num_threads) + ", q_len:seq_len";
  for (int64_t i = 0; i < p.batch; ++i) {
    text += " " + std::to_string(p.query_len(i)) + ":" + std::to_string(p.seq_lens[i]);
  }
  return text;
}

// The key range of a row from the words of the contract: a causal row sees keys
// up to its own position, and a window keeps the last ones of what it sees.
std::pair<int64_t, int64_t> visible_by_definition(bool causal, int64_t window, int64_t seq_len,
                                                  int64_t query_len, int64_t token) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < seq_len; ++key) {
    if (!causal || key <= seq_len - query_len + token) keys.push_back(key);
  }
  const auto kept = window > 0 ? static_cast<size_t>(window) : keys.size();
  if (keys.size() > kept) keys.erase(keys.begin(), keys.end() - static_cast<ptrdiff_t>(kept));
  return keys.empty() ? std::make_pair<int64_t, int64_t>(0, 0)
                      : std::make_pair(keys.front(), keys.back() + 1);
}

TEST(rows_see_the_keys_of_the_definition) {
  for (int64_t seq_len = 0; seq_len <= 20; ++seq_len) {
    for (int64_t query_len = 1; query_len <= 9; ++query_len) {
      for (int64_t token = 0; token < query_len; ++token) {
        for (int64_t window = 0; window <= 22; ++window) {
          for (const bool causal : {false, true}) {
            AttentionProblem problem;
            problem.causal = causal;
            problem.window = window;
            const KeyRange range = visible_keys(problem, seq_len, query_len, token);
            const auto expected = visible_by_definition(causal, window, seq_len, query_len, token);
            TRACE("%d keys, row %d of %d, window %d, causal %d", static_cast<int>(seq_len),
                  static_cast<int>(token), static_cast<int>(query_len), static_cast<int>(window),
                  causal);
            CHECK_EQ(range.begin, expected.first);
            CHECK_EQ(range.end, expected.second);
          }
        }
      }
    }
  }
}

TEST(a_window_of_any_size_is_safe) {
  AttentionProblem problem;
  problem.window = std::numeric_limits<int64_t>::max();
  const KeyRange range = visible_keys(problem, INT32_MAX, 8, 7);
  CHECK_EQ(range.begin, 0);
  CHECK_EQ(range.end, int64_t{INT32_MAX});
}

// Memory for a work list of exactly the planned size. Units need no destructor.
struct PlannedCall {
  explicit PlannedCall(const Case& test)
      : layout(plan_workspace(test.problem, test.num_threads, scratch_bytes)),
        memory(new char[static_cast<size_t>(layout.max_units) * sizeof(Unit) + 1]),
        plan(make_plan(test.problem, test.num_threads, memory.get())) {}

  WorkspaceLayout layout;
  std::unique_ptr<char[]> memory;
  Plan plan;
};

// The splits that some row of a unit sees.
std::pair<int64_t, int64_t> splits_by_definition(const AttentionProblem& problem,
                                                 const Unit& unit) {
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = -1;
  for (int64_t row = unit.row_begin; row < unit.row_begin + unit.rows; ++row) {
    const KeyRange keys = visible_keys(problem, problem.seq_lens[unit.request],
                                       problem.query_len(unit.request), row / problem.group());
    if (keys.begin >= keys.end) continue;
    first = std::min(first, keys.begin / kSplitTokens);
    last = std::max(last, (keys.end - 1) / kSplitTokens);
  }
  return {first, last + 1};
}

void check_units(const AttentionProblem& problem, const PlannedCall& call) {
  CHECK(call.plan.num_units <= call.layout.max_units);
  std::map<std::pair<int64_t, int64_t>, int64_t> next_row;  // by request and head
  for (int64_t i = 0; i < call.plan.num_units; ++i) {
    const Unit& unit = call.plan.units[i];
    TRACE("unit %d", static_cast<int>(i));
    CHECK(0 <= unit.request && unit.request < problem.batch);
    CHECK(0 <= unit.kv_head && unit.kv_head < problem.kv_heads);
    CHECK(0 < unit.rows && unit.rows <= call.layout.max_unit_rows);
    int64_t& row = next_row[{unit.request, unit.kv_head}];
    CHECK_EQ(unit.row_begin, row);
    row += unit.rows;

    const auto [first, last] = splits_by_definition(problem, unit);
    if (last == 0) {
      CHECK_EQ(unit.split_begin, unit.split_end);
    } else {
      CHECK_EQ(unit.split_begin, first);
      CHECK_EQ(unit.split_end, last);
    }
  }
  for (int64_t request = 0; request < problem.batch; ++request) {
    for (int64_t head = 0; head < problem.kv_heads; ++head) {
      const int64_t rows = next_row[{request, head}];
      CHECK_EQ(rows, problem.query_len(request) * problem.group());
    }
  }
}

// Items number on through the units, and each unit's are aligned nodes of the
// tree that cover its splits.
void check_items(const PlannedCall& call) {
  int64_t item = 0;
  for (int64_t i = 0; i < call.plan.num_units; ++i) {
    const Unit& unit = call.plan.units[i];
    CHECK_EQ(unit.first_item, item);
    CHECK(unit.items() >= 1);
    CHECK_EQ(unit.unfinished.load(), unit.items());
    int64_t split = unit.split_begin;
    for (int64_t j = 0; j < unit.items(); ++j, ++item) {
      CHECK_EQ(&call.plan.unit_of(item), &unit);
      const int64_t node = (unit.split_begin >> unit.level) + j;
      const int64_t node_end =
          unit.level >= 62 ? unit.split_end : std::min(unit.split_end, (node + 1) << unit.level);
      CHECK_EQ(std::max(unit.split_begin, node << unit.level), split);
      CHECK(node_end > split || unit.split_begin == unit.split_end);
      split = node_end;
    }
    CHECK_EQ(split, unit.split_end);
  }
  CHECK_EQ(item, call.plan.num_items);
}

// Partials: per item of an FP32 unit that has several; per split of a half one.
void check_partials(const AttentionProblem& problem, const PlannedCall& call) {
  const bool half = partial_kind(problem.route) == PartialKind::kHalfPerSplit;
  int64_t next = 0;
  for (int64_t i = 0; i < call.plan.num_units; ++i) {
    const Unit& unit = call.plan.units[i];
    const int64_t partials = half               ? unit.split_end - unit.split_begin
                             : unit.items() > 1 ? unit.items()
                                                : 0;
    if (partials == 0) continue;
    CHECK_EQ(unit.first_partial, next);
    next += partials * unit.rows;
  }
  CHECK(next <= call.layout.max_partial_rows);
}

void check_layout(const AttentionProblem& problem, const PlannedCall& call, int num_threads) {
  const WorkspaceLayout& layout = call.layout;
  const size_t row_bytes = partial_row_bytes(partial_kind(problem.route), problem.head_dim);
  CHECK_EQ(layout.units_offset % 64, 0u);
  CHECK_EQ(layout.partials_offset % 64, 0u);
  CHECK_EQ(layout.scratch_offset % 64, 0u);
  CHECK_EQ(layout.scratch_bytes_per_thread % 64, 0u);
  CHECK(layout.partials_offset >=
        layout.units_offset + static_cast<size_t>(layout.max_units) * sizeof(Unit));
  CHECK(layout.scratch_offset >=
        layout.partials_offset + static_cast<size_t>(layout.max_partial_rows) * row_bytes);
  CHECK(layout.total_bytes >=
        layout.scratch_offset + static_cast<size_t>(num_threads) * layout.scratch_bytes_per_thread);
  CHECK(layout.scratch_bytes_per_thread >=
        scratch_bytes(layout.max_unit_rows, problem.head_dim, layout.max_tree_depth));
  for (int64_t i = 0; i < call.plan.num_units; ++i) {
    CHECK(layout.max_tree_depth >= log2_ceil(call.plan.units[i].split_end) + 2);
  }
}

TEST(the_work_list_covers_everything_once) {
  Random random(3);
  for (int i = 0; i < 4000; ++i) {
    Case test;
    fill_random(test, random);
    TRACE("%s", describe(test).c_str());
    const PlannedCall call(test);
    check_units(test.problem, call);
    check_items(call);
    check_partials(test.problem, call);
    check_layout(test.problem, call, test.num_threads);
  }
}

TEST(threads_change_the_items_and_not_the_units) {
  Random random(4);
  for (int i = 0; i < 300; ++i) {
    Case test;
    fill_random(test, random);
    TRACE("%s", describe(test).c_str());
    const PlannedCall a(test);
    test.num_threads = static_cast<int>(random.integer(1, 64));
    const PlannedCall b(test);
    CHECK_EQ(a.plan.num_units, b.plan.num_units);
    for (int64_t j = 0; j < a.plan.num_units; ++j) {
      const Unit& one = a.plan.units[j];
      const Unit& two = b.plan.units[j];
      CHECK_EQ(one.row_begin, two.row_begin);
      CHECK_EQ(one.rows, two.rows);
      CHECK_EQ(one.split_begin, two.split_begin);
      CHECK_EQ(one.split_end, two.split_end);
    }
  }
}

TEST(a_long_context_gives_every_thread_work) {
  for (const int num_threads : {2, 3, 8, 16}) {
    TRACE("threads %d", num_threads);
    Case test;
    test.problem.route = FV_ROUTE_GROUPED_FP32;
    test.problem.q_heads = 6;
    test.problem.kv_heads = 1;
    test.problem.head_dim = 256;
    test.num_threads = num_threads;
    test.set_requests({8}, {262144});
    const PlannedCall call(test);
    CHECK_EQ(call.plan.num_units, 1);
    CHECK(call.plan.num_items >= 4 * num_threads);
    CHECK(call.plan.num_items <= 16 * num_threads + 2);
    test.num_threads = 1;
    CHECK_EQ(PlannedCall(test).plan.num_items, 1);
  }
}

// ---- Capacities ----------------------------------------------------------------

void check_not_smaller(const WorkspaceLayout& capacity, const WorkspaceLayout& call) {
  CHECK(capacity.max_units >= call.max_units);
  CHECK(capacity.max_unit_rows >= call.max_unit_rows);
  CHECK(capacity.max_partial_rows >= call.max_partial_rows);
  CHECK(capacity.max_tree_depth >= call.max_tree_depth);
  CHECK(capacity.scratch_bytes_per_thread >= call.scratch_bytes_per_thread);
  CHECK(capacity.total_bytes >= call.total_bytes);
}

// A workspace for so many rows, requests and pages serves any call within, the
// rows dealt to the requests in any way.
TEST(a_capacity_serves_every_call_within) {
  Random random(5);
  for (int i = 0; i < 4000; ++i) {
    Case test;
    fill_random(test, random);
    AttentionProblem capacity = test.problem;
    capacity.seq_lens = nullptr;
    capacity.query_start_loc = nullptr;
    const int64_t spare = random.pick<int64_t>({0, 0, 1, 3, 100});
    capacity.rows += random.integer(0, spare);
    capacity.batch += random.integer(0, spare);
    capacity.max_pages += random.integer(0, spare);
    const int threads = test.num_threads + static_cast<int>(random.integer(0, spare));
    TRACE("%s; capacity of %d rows, %d requests, %d pages, %d threads", describe(test).c_str(),
          static_cast<int>(capacity.rows), static_cast<int>(capacity.batch),
          static_cast<int>(capacity.max_pages), threads);
    check_not_smaller(plan_workspace(capacity, threads, scratch_bytes),
                      plan_workspace(test.problem, test.num_threads, scratch_bytes));
  }
}

// The worst distributions of rows: everything in one request, or requests that
// each begin one more unit.
TEST(rows_may_be_dealt_to_requests_in_any_way) {
  for (const int64_t group : {1, 6, 16, 71, 300}) {
    for (const fv_route route : kRoutes) {
      TRACE("group %d, route %d", static_cast<int>(group), route);
      AttentionProblem capacity;
      capacity.route = route;
      capacity.kv_heads = 2;
      capacity.q_heads = 2 * group;
      capacity.head_dim = 128;
      capacity.page_size = 16;
      capacity.max_pages = 4096;
      capacity.rows = 96;
      capacity.batch = 12;
      const WorkspaceLayout room = plan_workspace(capacity, 8, scratch_bytes);

      std::vector<std::vector<int64_t>> deals;
      deals.push_back({96});
      deals.push_back(std::vector<int64_t>(12, 8));
      std::vector<int64_t> uneven(12, 1);
      uneven[5] = 85;
      deals.push_back(uneven);
      std::vector<int64_t> with_empty(12, 0);
      with_empty[0] = with_empty[11] = 48;
      deals.push_back(with_empty);
      const int64_t one_more = kMaxUnitRows / group + 1;  // rows of one unit, and one
      if (one_more <= 96)
        deals.push_back(std::vector<int64_t>(
            static_cast<size_t>(std::min<int64_t>(12, 96 / one_more)), one_more));

      for (const std::vector<int64_t>& query_lens : deals) {
        Case test;
        test.problem = capacity;
        test.num_threads = 8;
        test.set_requests(query_lens, std::vector<int64_t>(query_lens.size(), 65536));
        const PlannedCall call(test);
        check_not_smaller(room, call.layout);
        check_units(test.problem, call);
        check_items(call);
        check_partials(test.problem, call);
      }
    }
  }
}

TEST(empty_problems_need_next_to_nothing) {
  Case test;
  test.problem.route = FV_ROUTE_GROUPED_FP32;
  test.problem.q_heads = test.problem.kv_heads = 1;
  test.problem.head_dim = 64;
  test.problem.page_size = 16;
  for (const int num_threads : {1, 16}) {
    test.num_threads = num_threads;
    test.set_requests({}, {});
    CHECK_EQ(PlannedCall(test).plan.num_items, 0);
    test.set_requests({0, 0}, {5000, 0});
    CHECK_EQ(PlannedCall(test).plan.num_items, 0);
    test.set_requests({3, 1}, {0, 0});  // units that write zeros
    CHECK_EQ(PlannedCall(test).plan.num_items, 2);
  }
}

// The largest capacity that the ABI lets pass, 2^60 bytes by its own count.
TEST(sizes_of_huge_capacities_do_not_overflow) {
  for (const fv_route route : kRoutes) {
    TRACE("route %d", route);
    AttentionProblem problem;
    problem.route = route;
    problem.kv_heads = 16;
    problem.q_heads = 1024;
    problem.head_dim = 512;
    problem.page_size = 65536;
    problem.max_pages = 32768;  // 2^31 keys
    problem.batch = 1 << 17;
    problem.rows = 1 << 17;
    const WorkspaceLayout layout = plan_workspace(problem, 1024, scratch_bytes);
    CHECK(layout.max_units > 0 && layout.max_partial_rows > 0);
    // Counted again where nothing overflows.
    const double partials = static_cast<double>(layout.max_partial_rows) *
                            static_cast<double>(partial_row_bytes(partial_kind(route), 512));
    const double total = partials + static_cast<double>(layout.max_units) * sizeof(Unit) +
                         1024 * static_cast<double>(layout.scratch_bytes_per_thread);
    CHECK_NEAR(static_cast<double>(layout.total_bytes) / total, 1.0, 1e-6);
    if (partial_kind(route) == PartialKind::kHalfPerSplit) {
      CHECK_EQ(layout.max_partial_rows, problem.rows * 1024 * ((int64_t{1} << 21) + 1));
    }
  }
}

TEST(partial_rows_hold_maximum_sum_and_padded_output) {
  CHECK_EQ(partial_row_bytes(PartialKind::kFp32PerItem, 1), 8u + 64 * 4);
  CHECK_EQ(partial_row_bytes(PartialKind::kFp32PerItem, 256), 8u + 256 * 4);
  CHECK_EQ(partial_row_bytes(PartialKind::kHalfPerSplit, 80), 8u + 128 * 2);
  CHECK(partial_kind(FV_ROUTE_GROUPED_FP32) == PartialKind::kFp32PerItem);
  CHECK(partial_kind(FV_ROUTE_SCALAR_FP32) == PartialKind::kFp32PerItem);
  CHECK(partial_kind(FV_ROUTE_GROUPED_HALF) == PartialKind::kHalfPerSplit);
  CHECK(partial_kind(FV_ROUTE_SCALAR_HALF) == PartialKind::kHalfPerSplit);
  CHECK(partial_kind(FV_ROUTE_XQA_HALF) == PartialKind::kHalfPerSplit);
}

}  // namespace
}  // namespace flashverify

TEST_MAIN()
