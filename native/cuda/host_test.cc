// What of the CUDA backend can be tested without a GPU: plans, errors, layouts.
#include <algorithm>
#include <string>
#include <utility>

#include "native/cuda/cuda.h"
#include "native/cuda/device.h"
#include "native/cuda/device/grouped_geometry.h"
#include "native/cuda/grouped_plan.h"
#include "native/testing/check.h"

namespace flashverify::cuda {
namespace {

AttentionProblem problem(int64_t batch, int64_t query_len, int64_t q_heads, int64_t kv_heads,
                         int64_t head_dim) {
  AttentionProblem p;
  p.route = FV_ROUTE_GROUPED_FP32;
  p.batch = batch;
  p.rows = batch * query_len;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.page_size = 16;
  p.max_pages = 1024;
  p.q_dtype = p.out_dtype = FV_DTYPE_FLOAT16;
  p.kv_dtype = FV_DTYPE_FLOAT8_E4M3;
  return p;
}

PlanDevice hopper() {
  return {132, [](const std::string& source) {
            return std::string(source.find("sm90") != std::string::npos ? "sm_90a" : "sm_90");
          }};
}
PlanDevice device_with(const std::string& image) {
  return {84, [image](const std::string& source) {
            return source.find("sm90") != std::string::npos ? std::string() : image;
          }};
}

GroupedPlan planned(const AttentionProblem& p, const PlanDevice& device, int splits = 128) {
  Target target;
  target.splits = splits;
  GroupedPlan plan;
  const Status status = plan_grouped(p, device, target, &plan);
  TRACE("%s", status.message.c_str());
  CHECK(status.ok());
  return plan;
}
Status refused(const AttentionProblem& p, const PlanDevice& device, const Target& target = {}) {
  GroupedPlan plan;
  const Status status = plan_grouped(p, device, target, &plan);
  CHECK(!status.ok());
  return status;
}
bool mentions(const Status& status, const std::string& text) {
  return status.message.find(text) != std::string::npos;
}

TEST(verification_takes_one_row_tile_and_every_split_is_an_item) {
  const GroupedPlan plan = planned(problem(1, 8, 6, 1, 256), hopper());
  CHECK_EQ(plan.kernel, std::string("grouped_fp32_e4m3_d256_r48"));
  CHECK_EQ(plan.source, std::string("grouped_sm90_e4m3_d256"));
  CHECK_EQ(plan.row_tiles, 1);
  CHECK_EQ(plan.fold, 1);
  CHECK_EQ(plan.blocks, 132);
  CHECK(plan.has_bulk_copy);
  // 128 splits of 48 rows: a maximum, a sum and 256 floats each.
  CHECK_EQ(plan.workspace_bytes, size_t{128 * 48 * (8 + 256 * 4)});
}

TEST(a_large_batch_folds_groups_and_a_small_schedule_stores_nothing) {
  CHECK_EQ(planned(problem(8, 8, 6, 1, 256), hopper()).fold, 8);
  const GroupedPlan all = planned(problem(16, 8, 32, 8, 128), hopper(), 1);
  CHECK_EQ(all.fold, 1);
  CHECK_EQ(all.workspace_bytes, size_t{64});
}

TEST(more_rows_than_a_tile_become_tiles) {
  const GroupedPlan plan = planned(problem(1, 16, 24, 4, 256), hopper());
  CHECK_EQ(plan.row_blocks, 6);
  CHECK_EQ(plan.row_tiles, 2);
}

TEST(query_starts_leave_room_for_every_division_of_the_rows) {
  AttentionProblem p = problem(4, 8, 6, 1, 256);
  const int32_t* const starts = reinterpret_cast<const int32_t*>(64);  // device memory, not read
  p.query_start_loc = starts;
  CHECK_EQ(planned(p, hopper()).row_tiles, 4 * 8 * 6 / 48 + 4);
}

// However rows are dealt to requests, and however few of them there are.
TEST(a_capacity_serves_every_call_within_it) {
  static const int32_t starts = 0;
  const PlanDevice devices[] = {hopper(), device_with("sm_80"), device_with("sm_89"),
                                device_with("sm_70")};
  for (const PlanDevice& device : devices) {
    for (const fv_route route : {FV_ROUTE_GROUPED_FP32, FV_ROUTE_GROUPED_HALF}) {
      for (const int splits : {1, 8, 16, 128}) {
        for (const auto& [most_batch, most_rows] : {std::pair{1, 64}, {9, 72}, {80, 640}}) {
          AttentionProblem p = problem(most_batch, 1, 6, 2, 128);
          p.rows = most_rows;
          p.route = route;
          Target target;
          target.splits = splits;
          size_t capacity = 0;
          CHECK(grouped_capacity_bytes(p, device, target, &capacity).ok());
          for (int64_t batch = 1; batch <= most_batch; batch += batch / 4 + 1) {
            for (int64_t rows = batch; rows <= std::min<int64_t>(most_rows, 64 * batch);
                 rows += rows / 5 + 1) {
              AttentionProblem call = p;
              call.batch = batch;
              call.rows = rows;
              call.query_start_loc = &starts;
              CHECK(planned(call, device, splits).workspace_bytes <= capacity);
              if (rows % batch != 0) continue;
              call.query_start_loc = nullptr;
              CHECK(planned(call, device, splits).workspace_bytes <= capacity);
            }
          }
        }
      }
    }
  }
}

TEST(a_device_with_little_shared_memory_takes_fewer_rows_at_once) {
  const AttentionProblem p = problem(1, 8, 6, 1, 256);
  CHECK_EQ(planned(p, device_with("sm_86")).row_blocks, 2);
  CHECK_EQ(planned(p, device_with("sm_80")).row_blocks, 3);
  for (const char* image : {"sm_80", "sm_86", "sm_89", "sm_100", "sm_120"}) {
    TRACE("%s", image);
    CHECK(planned(p, device_with(image)).shared_bytes <= FV_SHARED_LIMIT(10 * arch_number(image)));
  }
}

TEST(sm_70_and_sm_75_have_a_kernel_of_their_own) {
  const AttentionProblem p = problem(1, 8, 6, 1, 256);
  const GroupedPlan volta = planned(p, device_with("sm_70"));
  CHECK_EQ(volta.source, std::string("grouped_sm70_e4m3_d256"));
  CHECK_EQ(volta.kernel, std::string("grouped_fp32_e4m3_d256_r48"));
  CHECK_EQ(volta.threads, 256);
  CHECK(!volta.has_bulk_copy);
  const GroupedPlan turing = planned(p, device_with("sm_75"));
  CHECK_EQ(turing.source, std::string("grouped_sm70_e4m3_d256"));
  CHECK_EQ(turing.row_blocks, 2);
  CHECK_EQ(turing.row_tiles, 3);
  for (const int64_t dim : {64, 128, 256}) {
    for (const fv_dtype kv : {FV_DTYPE_FLOAT8_E4M3, FV_DTYPE_FLOAT16}) {
      for (const int64_t query_len : {1, 8}) {
        AttentionProblem any = problem(2, query_len, 6, 1, dim);
        any.kv_dtype = kv;
        CHECK(planned(any, device_with("sm_70")).shared_bytes <= FV_SHARED_LIMIT(700));
        CHECK(planned(any, device_with("sm_75")).shared_bytes <= FV_SHARED_LIMIT(750));
      }
    }
  }
}

TEST(a_named_image_decides_the_kernel_family) {
  Target target;
  target.image = "compute_70";
  GroupedPlan plan;
  CHECK(plan_grouped(problem(1, 8, 6, 1, 256), hopper(), target, &plan).ok());
  CHECK_EQ(plan.source, std::string("grouped_sm70_e4m3_d256"));
  CHECK_EQ(plan.shared_bytes, planned(problem(1, 8, 6, 1, 256), device_with("sm_70")).shared_bytes);
}

TEST(what_is_folded_in_memory_has_a_place_there) {
  const PlanDevice volta = device_with("sm_70");
  // 48 rows of 256 d: a group at most, and never in a half-precision partial.
  AttentionProblem p = problem(64, 8, 6, 1, 256);
  CHECK_EQ(planned(p, volta).fold, kChain);
  CHECK_EQ(planned(p, volta, 8).fold, 1);
  CHECK_EQ(planned(p, volta, 1).fold, 1);
  CHECK_EQ(planned(p, volta, 1).workspace_bytes, size_t{64});
  p.route = FV_ROUTE_GROUPED_HALF;
  CHECK_EQ(planned(p, volta).fold, 1);
  // In registers, all of them.
  CHECK_EQ(planned(problem(84, 8, 32, 8, 128), volta).fold, 128);
}

TEST(what_no_kernel_computes_is_refused_in_words) {
  AttentionProblem p = problem(1, 8, 6, 1, 320);
  CHECK_EQ(refused(p, hopper()).code, FV_ERROR_UNSUPPORTED);
  CHECK(mentions(refused(p, hopper()), "head_dim: 320"));
  p = problem(1, 8, 6, 1, 100);
  CHECK(mentions(refused(p, hopper()), "multiples of 16"));
  p = problem(1, 8, 6, 1, 128);
  p.kv_dtype = FV_DTYPE_BFLOAT16;
  CHECK(mentions(refused(p, hopper()), "bfloat16"));
  p.q_dtype = FV_DTYPE_BFLOAT16;
  CHECK_EQ(planned(p, hopper()).source, std::string("grouped_sm90_bf16_d128"));
  for (const char* image : {"sm_70", "sm_75"}) {
    TRACE("%s", image);
    CHECK(mentions(refused(p, device_with(image)), "scalar_fp32"));
    CHECK(mentions(refused(p, device_with(image)), "kv_dtype"));
  }
  CHECK(mentions(refused(problem(1, 8, 6, 1, 128), device_with("")), "of this device"));
}

TEST(schedules_are_powers_of_two) {
  for (const int splits : {-1, 0, 3, 96, 129, 256}) {
    TRACE("n%d", splits);
    Target target;
    target.splits = splits;
    const Status status = refused(problem(1, 8, 6, 1, 128), hopper(), target);
    CHECK_EQ(status.code, FV_ERROR_INVALID_ARGUMENT);
    CHECK(mentions(status, "schedule: n" + std::to_string(splits)));
  }
}

TEST(architectures_are_read_from_names) {
  CHECK_EQ(arch_number("sm_90a"), 90);
  CHECK_EQ(arch_number("compute_70"), 70);
  CHECK_EQ(arch_number("sm_120"), 120);
  CHECK_EQ(arch_number(""), 0);
}

TEST(driver_errors_carry_the_drivers_text) {
  Driver driver = {};
  driver.error_name = [](Result, const char** text) {
    *text = "CUDA_ERROR_LAUNCH_FAILED";
    return kSuccess;
  };
  driver.error_string = [](Result, const char** text) {
    *text = "unspecified launch failure";
    return kSuccess;
  };
  CHECK(check(driver, kSuccess, "a call").ok());
  const Status failed = check(driver, 719, "a call");
  CHECK_EQ(failed.code, FV_ERROR_DEVICE);
  CHECK_EQ(failed.message,
           std::string("a call: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"));
  CHECK_EQ(check(driver, kErrorOutOfMemory, "a call").code, FV_ERROR_OUT_OF_MEMORY);
}

TEST(a_machine_without_a_driver_says_so) {
  const Driver* driver = nullptr;
  const Status status = get_driver(&driver);
  if (status.ok()) return;  // this machine has one
  CHECK_EQ(status.code, FV_ERROR_DEVICE);
  CHECK(mentions(status, "CUDA"));
  AttentionPlan plan;
  CHECK_EQ(plan_attention(problem(1, 8, 6, 1, 256), {}, &plan).code, FV_ERROR_DEVICE);
}

}  // namespace
}  // namespace flashverify::cuda

TEST_MAIN()
