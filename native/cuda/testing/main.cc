// check WHAT [IMAGE]: correctness and invariance of the kernels; bench WHAT [IMAGE]:
// speed. WHAT is all, types, types:f16, d256, d128, d64, faults, arms; IMAGE, say
// compute_70, runs in place of the device's own. Prints one line per finding.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "native/cuda/testing/case.h"

namespace flashverify::cuda::testing {
namespace {

int failures = 0;
std::string forced_image;  // of every case; empty: the device's own

std::string describe(const CaseSpec& s) {
  char text[256];
  std::snprintf(text, sizeof(text), "B%zu L%d q%d Hq%d Hkv%d D%d page %d kv%d q%d out%d route%d%s",
                s.lengths.size(), s.lengths[0], s.query_lens[0], s.q_heads, s.kv_heads, s.head_dim,
                s.page_size, s.kv_type, s.q_type, s.out_type, s.route, s.window ? " window" : "");
  return text;
}

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
  std::fflush(stdout);
}

CaseSpec uniform_case(int batch, int length, int q, int q_heads, int kv_heads, int dim, int page) {
  CaseSpec s;
  s.lengths.assign(static_cast<size_t>(batch), length);
  s.query_lens.assign(static_cast<size_t>(batch), q);
  s.q_heads = q_heads;
  s.kv_heads = kv_heads;
  s.head_dim = dim;
  s.page_size = page;
  s.image = forced_image;
  return s;
}

const char* name_of(fv_dtype type) {
  switch (type) {
    case FV_DTYPE_FLOAT8_E4M3:
      return "e4m3";
    case FV_DTYPE_FLOAT8_E5M2:
      return "e5m2";
    case FV_DTYPE_FLOAT16:
      return "f16";
    default:
      return "bf16";
  }
}

// The tensor cores before sm_80 know no bfloat16.
bool has_bfloat() {
  return forced_image != "compute_70" && forced_image != "sm_70" && forced_image != "sm_75";
}

Case::Error check(Gpu& gpu, const CaseSpec& spec, double slack = 1.05) {
  Case c(gpu, spec);
  c.run();
  const Case::Error e = c.compare();
  const bool legacy = spec.route != FV_ROUTE_GROUPED_FP32 && spec.route != FV_ROUTE_SCALAR_FP32;
  const double limit = legacy ? 3e-3 : e.floor * slack + 2e-6;
  std::printf("%s %s: error %.4e floor %.4e worst row %.3e lse %.2e\n",
              e.finite && e.relative <= limit && e.lse < 1e-4 ? "ok  " : "BAD ",
              describe(spec).c_str(), e.relative, e.floor, e.worst_row, e.lse);
  std::fflush(stdout);
  if (!(e.finite && e.relative <= limit && e.lse < 1e-4)) ++failures;
  return e;
}

// Row j of a block of q rows, alone: same bits, wherever it stands.
void check_rows_alone(Gpu& gpu, CaseSpec spec, const std::vector<int>& lengths) {
  const int q = spec.query_lens[0];
  int mismatches = 0, compared = 0;
  Case block(gpu, spec);
  CaseSpec alone_spec = spec;
  alone_spec.query_lens.assign(1, 1);
  Case alone(gpu, alone_spec);
  for (const int length : lengths) {
    block.set_length(0, length);
    block.poison_output();
    block.run();
    const auto expected = block.output_bytes();
    const size_t row_bytes = expected.size() / static_cast<size_t>(q);
    for (int j = 0; j < q; ++j) {
      if (length - q + j + 1 < 1) continue;
      alone.copy_query(block, j);
      alone.set_length(0, length - q + j + 1);
      alone.poison_output();
      alone.run();
      ++compared;
      if (std::memcmp(alone.output_bytes().data(),
                      expected.data() + static_cast<size_t>(j) * row_bytes, row_bytes) != 0) {
        ++mismatches;
        if (mismatches <= 4) std::printf("  row %d at length %d differs\n", j, length);
      }
    }
  }
  std::printf("%s q1 against q%d, %s: %d of %d differ\n", mismatches ? "BAD " : "ok  ", q,
              describe(spec).c_str(), mismatches, compared);
  std::fflush(stdout);
  failures += mismatches != 0;
}

// The same request in other company, pages, page sizes, block counts, strides.
void check_company(Gpu& gpu, CaseSpec spec) {
  Case base(gpu, spec);
  base.run();
  const auto expected = base.output_bytes();
  const auto compare = [&](Case& other, size_t offset, const char* what) {
    const auto got = other.output_bytes();
    const bool same = std::memcmp(got.data() + offset, expected.data(), expected.size()) == 0;
    std::printf("%s %s, %s\n", same ? "ok   same bits:" : "BAD  other bits:", what,
                describe(spec).c_str());
    std::fflush(stdout);
    failures += !same;
  };
  for (const int blocks : {97, 61, 8}) {
    base.poison_output();
    Target target;
    target.max_blocks = blocks;
    target.image = spec.image;
    base.run(target);
    compare(base, 0, blocks == 97 ? "97 blocks" : blocks == 61 ? "61 blocks" : "8 blocks");
  }
  for (const int page : {16, 1728, 3296, 3456, 8, 40, 100, 1}) {
    if (page == 1 && spec.lengths[0] > 40000) continue;
    CaseSpec other = spec;
    other.page_size = page;
    other.page_seed = 7;
    other.force_query_start = page == 16;
    Case c(gpu, other);
    c.run();
    compare(c, 0, ("page size " + std::to_string(page)).c_str());
  }
  {
    CaseSpec other = spec;
    other.token_padding =
        13 * (spec.kv_type == FV_DTYPE_FLOAT16 || spec.kv_type == FV_DTYPE_BFLOAT16 ? 2 : 1);
    Case c(gpu, other);
    c.run();
    compare(c, 0, "odd strides");
  }
  for (const int batch : {8, 64}) {
    if (static_cast<int64_t>(batch) * spec.lengths[0] * spec.kv_heads > 3000000) continue;
    CaseSpec other = spec;
    other.lengths.assign(static_cast<size_t>(batch), spec.lengths[0]);
    other.query_lens.assign(static_cast<size_t>(batch), spec.query_lens[0]);
    for (size_t b = 1; b < other.lengths.size(); ++b) {
      other.lengths[b] =
          static_cast<int>((b * 7919u * 131u) % static_cast<unsigned>(spec.lengths[0])) + 8;
      other.query_lens[b] = static_cast<int>(b % 3) * 4;
    }
    Case c(gpu, other);
    c.run();
    compare(c, 0, batch == 8 ? "first of batch 8, mixed" : "first of batch 64, mixed");
  }
}

void check_faults(Gpu& gpu) {
  // A NaN code that only the last row attends: the other rows' bits stay.
  for (const int which : {0, 1}) {
    CaseSpec spec = uniform_case(1, 5000, 8, 6, 1, 256, 1728);
    Case c(gpu, spec);
    c.run();
    const auto clean = c.output_bytes();
    const unsigned char nan = 0x7f;
    gpu.to_device(c.element(which, 0, 4999, 0, 37), &nan, 1);
    c.poison_output();
    c.run();
    const auto dirty = c.output_bytes();
    const size_t row = clean.size() / 8;
    expect(std::memcmp(clean.data(), dirty.data(), 7 * row) == 0,
           "NaN of the last key reached other rows");
    int nans = 0;
    for (size_t i = 7 * row; i < 8 * row; i += 2)
      nans += std::isnan(to_double(&dirty[i], FV_DTYPE_FLOAT16));
    expect(nans == (which == 0 ? 6 * 256 : 6),
           "NaN of an attended key: " + std::to_string(nans) + " elements");
    // Attended by all.
    gpu.to_device(c.element(which, 0, 100, 0, 3), &nan, 1);
    c.run();
    const auto all = c.output_bytes();
    nans = 0;
    for (size_t i = 0; i < 7 * row; i += 2)
      nans += std::isnan(to_double(&all[i], FV_DTYPE_FLOAT16));
    expect(nans == (which == 0 ? 7 * 6 * 256 : 7 * 6),
           "NaN attended by all: " + std::to_string(nans) + " elements");
  }
  // Lengths that change under a captured graph; overrun; zero; negative.
  CaseSpec spec = uniform_case(4, 3000, 8, 8, 2, 128, 16);
  spec.capacity = 20000;
  Case c(gpu, spec);
  c.run();
  void* const graph = gpu.capture([&] { c.run(); });
  for (const int length : {3000, 20000, 5, 0, 12345}) {
    c.set_length(1, length);
    c.poison_output();
    gpu.replay(graph);
    const auto captured = c.output_bytes();
    c.poison_output();
    c.run();
    expect(captured == c.output_bytes(), "graph replay at length " + std::to_string(length));
    expect(c.status() == 0, "status after legal lengths");
  }
  for (const int length : {20001, -1}) {
    c.set_length(1, length);
    c.poison_output();
    gpu.replay(graph);
    const auto bytes = c.output_bytes();
    const size_t request = bytes.size() / 4;
    int nans = 0;
    for (size_t i = request; i < 2 * request; i += 2)
      nans += std::isnan(to_double(&bytes[i], FV_DTYPE_FLOAT16));
    expect(nans == static_cast<int>(request / 2), "overrun gives NaN: " + std::to_string(nans));
    expect(c.status() == (length < 0 ? 2u : 1u), "status of an overrun");
    expect(c.status() == 0, "status is cleared by reading");
  }
}

// Every route, type and head dimension at one shape.
void check_types(Gpu& gpu, const std::string& what) {
  for (const fv_route route :
       {FV_ROUTE_GROUPED_FP32, FV_ROUTE_GROUPED_HALF, FV_ROUTE_SCALAR_FP32, FV_ROUTE_SCALAR_HALF}) {
    const bool scalar = route == FV_ROUTE_SCALAR_FP32 || route == FV_ROUTE_SCALAR_HALF;
    for (const fv_dtype kv :
         {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT8_E5M2, FV_DTYPE_FLOAT16, FV_DTYPE_BFLOAT16}) {
      if (!scalar && kv == FV_DTYPE_BFLOAT16 && !has_bfloat()) continue;
      if (what.rfind("types:", 0) == 0 && what.substr(6) != name_of(kv)) continue;
      for (const int dim : {64, 80, 128, 192, 256}) {
        if (scalar && dim != 80 && dim != 256) continue;
        for (const int q : {1, 8}) {
          CaseSpec s = uniform_case(2, 1234, q, 8, 2, dim, 48);
          s.lengths[1] = 300;
          s.route = route;
          s.kv_type = kv;
          s.q_type = kv == FV_DTYPE_BFLOAT16 ? FV_DTYPE_BFLOAT16 : FV_DTYPE_FLOAT16;
          s.out_type = s.q_type;
          check(gpu, s);
        }
      }
    }
  }
}

void run_checks(Gpu& gpu, const std::string& what) {
  const bool all = what == "all";
  if (all || what.rfind("types", 0) == 0) check_types(gpu, what);
  if (what == "sanitize") {  // small: for compute-sanitizer
    CaseSpec s = uniform_case(2, 700, 8, 6, 1, 256, 3296);
    s.query_lens = {8, 3};
    s.window = 200;
    s.sinks = true;
    check(gpu, s);
    check(gpu, uniform_case(1, 3000, 1, 6, 1, 256, 16));
    check(gpu, uniform_case(3, 300, 8, 32, 8, 128, 100));
    check(gpu, uniform_case(1, 300, 8, 8, 2, 64, 16));
    s = uniform_case(1, 300, 8, 6, 1, 256, 16);
    s.route = FV_ROUTE_GROUPED_HALF;
    check(gpu, s);
    s = uniform_case(1, 300, 8, 8, 2, 128, 16);
    s.kv_type = FV_DTYPE_FLOAT16;
    check(gpu, s);
    // A NaN code that some rows attend, and strides that no vector load fits.
    Case poisoned(gpu, uniform_case(1, 300, 8, 6, 1, 256, 16));
    const unsigned char nan = 0x7f;
    gpu.to_device(poisoned.element(1, 0, 297, 0, 37), &nan, 1);
    poisoned.run();
    s = uniform_case(1, 200, 2, 6, 1, 256, 16);
    s.token_padding = 13;
    check(gpu, s);
    s = uniform_case(1, 300, 2, 4, 2, 80, 16);
    s.route = FV_ROUTE_SCALAR_FP32;
    check(gpu, s);
  }
  if (all || what == "d256") {
    check(gpu, uniform_case(1, 4096, 8, 6, 1, 256, 3296));
    check(gpu, uniform_case(1, 262144, 8, 6, 1, 256, 3296));
    check(gpu, uniform_case(1, 1000, 1, 6, 1, 256, 16));
    check(gpu, uniform_case(8, 5000, 8, 6, 1, 256, 1728));
    check(gpu, uniform_case(2, 700, 16, 24, 4, 256, 3456));
    CaseSpec s = uniform_case(3, 4096, 8, 6, 1, 256, 3296);
    s.lengths = {5, 129, 3000};
    s.query_lens = {8, 3, 8};
    s.window = 300;
    s.sinks = true;
    s.softcap = 20.0f;
    s.k_scale = 0.7f;
    s.v_scale = 1.9f;
    check(gpu, s);
    s.causal = false;
    s.q_type = FV_DTYPE_BFLOAT16;
    s.out_type = FV_DTYPE_FLOAT32;
    check(gpu, s, 1.05);
    check_rows_alone(gpu, uniform_case(1, 262144, 8, 6, 1, 256, 3296),
                     {8, 63, 65, 129, 257, 1000, 4097, 16384, 16385, 33000, 99999, 131074, 262144});
    CaseSpec w = uniform_case(1, 20000, 8, 6, 1, 256, 3296);
    w.window = 777;
    check_rows_alone(gpu, w, {3, 500, 777, 1000, 5000, 20000});
    check_company(gpu, uniform_case(1, 33333, 8, 6, 1, 256, 3296));
  }
  if (all || what == "faults") check_faults(gpu);
  if (all || what == "d128") {
    check(gpu, uniform_case(4, 5000, 8, 32, 8, 128, 16));
    check(gpu, uniform_case(16, 4096, 8, 32, 8, 128, 16));
    check(gpu, uniform_case(1, 777, 1, 32, 8, 128, 16));
    check_rows_alone(gpu, uniform_case(1, 33000, 8, 32, 8, 128, 16),
                     {8, 129, 1000, 4097, 16390, 33000});
    check_company(gpu, uniform_case(1, 9999, 8, 32, 8, 128, 16));
    CaseSpec d = uniform_case(2, 3000, 8, 32, 8, 80, 16);
    check(gpu, d);
  }
  if (all || what == "d64") {
    check(gpu, uniform_case(4, 5000, 8, 32, 8, 64, 16));
    check_rows_alone(gpu, uniform_case(1, 33000, 8, 32, 8, 64, 16),
                     {8, 129, 1000, 4097, 16390, 33000});
    check_company(gpu, uniform_case(1, 9999, 8, 32, 8, 64, 16));
  }
}

void bench(Gpu& gpu, const CaseSpec& spec, const char* label, int splits = 128) {
  Case c(gpu, spec);
  Target target;
  target.splits = splits;
  c.run(target);
  const Case::Error e = c.compare();
  const auto work = [&] { c.run(target); };
  const auto read = [&] {
    DevicePointer p = c.cache();
    // The bytes that the lengths cover, not the pages' padding.
    long long count = 0;
    for (const int length : spec.lengths) {
      count += 2LL * length * spec.kv_heads * spec.head_dim *
               (spec.kv_type == FV_DTYPE_FLOAT16 || spec.kv_type == FV_DTYPE_BFLOAT16 ? 2 : 1) / 16;
    }
    DevicePointer sink = 0;
    static DevicePointer memory = gpu.allocate(64);
    sink = memory;
    void* arguments[] = {&p, &count, &sink};
    gpu.launch("harness_read", 132 * 8, 1, 256, arguments);
  };
  const int n = 40;
  const double memset_us = gpu.graph_us(work, Gpu::Flush::kMemset, n);
  const double memset_read = gpu.graph_us(read, Gpu::Flush::kMemset, n);
  const double clean_us = gpu.graph_us(work, Gpu::Flush::kRead, n);
  const double clean_read = gpu.graph_us(read, Gpu::Flush::kRead, n);
  const double again = gpu.graph_us(work, Gpu::Flush::kMemset, n);
  std::printf(
      "bench %-31s n%-3d %s: memset %.1f (%.1f) / read %.1f = %.2f | clean %.1f / %.1f = %.2f | "
      "err %.4e floor %.4e\n",
      label, splits, c.image().c_str(), memset_us, again, memset_read, memset_us / memset_read,
      clean_us, clean_read, clean_us / clean_read, e.relative, e.floor);
  std::fflush(stdout);
}

void run_bench(Gpu& gpu, const std::string& what) {
  struct Row {
    const char* label;
    int batch, length, q, q_heads, kv_heads, dim, page;
  };
  const Row rows[] = {
      {"B1 256K q8 D256 p3296", 1, 262144, 8, 6, 1, 256, 3296},
      {"B1 256K q8 D256 p16", 1, 262144, 8, 6, 1, 256, 16},
      {"B1 256K q8 D256 p1728", 1, 262144, 8, 6, 1, 256, 1728},
      {"B1 256K q1 D256", 1, 262144, 1, 6, 1, 256, 3296},
      {"B1 64K q8 D256", 1, 65536, 8, 6, 1, 256, 3296},
      {"B1 16K q8 D256", 1, 16384, 8, 6, 1, 256, 3296},
      {"B1 4K q8 D256", 1, 4096, 8, 6, 1, 256, 3296},
      {"B8 32K q8 D256 p1728", 8, 32768, 8, 6, 1, 256, 1728},
      {"B16 16K q8 Hq32/8 D128 p16", 16, 16384, 8, 32, 8, 128, 16},
      {"B64 4K q1 Hq32/8 D128 p16", 64, 4096, 1, 32, 8, 128, 16},
      {"B1 128K q16 Hq24/4 D256 p3456", 1, 131072, 16, 24, 4, 256, 3456},
  };
  for (const Row& r : rows) {
    CaseSpec s = uniform_case(r.batch, r.length, r.q, r.q_heads, r.kv_heads, r.dim, r.page);
    bench(gpu, s, r.label);
    if (r.batch * r.kv_heads > 1) {
      int splits = 128;
      while (splits > 1 &&
             splits * r.batch * r.kv_heads * ((r.q * r.q_heads / r.kv_heads + 47) / 48) > 192)
        splits /= 2;
      bench(gpu, s, r.label, splits);
    }
    if (what == "arms" && r.q == 8 && r.dim == 256) {
      s.route = FV_ROUTE_GROUPED_HALF;
      bench(gpu, s, (std::string(r.label) + " half").c_str());
    }
  }
}

}  // namespace
}  // namespace flashverify::cuda::testing

int main(int argc, char** argv) {
  using namespace flashverify::cuda::testing;
  const std::string mode = argc > 1 ? argv[1] : "check";
  const std::string what = argc > 2 ? argv[2] : "all";
  if (argc > 3) forced_image = argv[3];
  Gpu gpu;
  if (mode == "check") run_checks(gpu, what);
  if (mode == "bench") run_bench(gpu, what);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
