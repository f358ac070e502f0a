#include "native/abi/error.h"
#include "native/abi/overlap.h"
#include "native/abi/validate.h"

namespace flashverify::abi {
namespace {

fv_status check_memory(const fv_merge_params& params) {
  using Access = RegionList::Access;
  FV_RETURN_IF_ERROR(check_no_self_overlap({"out", params.out}));
  FV_RETURN_IF_ERROR(check_no_self_overlap({"out_lse", params.out_lse}));
  RegionList regions;
  regions.add({"out", params.out}, Access::kWritten);
  regions.add({"out_lse", params.out_lse}, Access::kWritten);
  regions.add({"outs", params.outs}, Access::kRead);
  regions.add({"lses", params.lses}, Access::kRead);
  return regions.check();
}

}  // namespace

fv_status validate_merge(const fv_merge_params* params, cpu::MergeProblem* problem) {
  FV_RETURN_IF_ERROR(check_call(params));
  const Argument outs{"outs", params->outs};
  const Argument lses{"lses", params->lses};
  const Argument out{"out", params->out};
  const Argument out_lse{"out_lse", params->out_lse};
  FV_RETURN_IF_ERROR(check_tensor(outs, {4, kFloat32}));
  FV_RETURN_IF_ERROR(check_axis_range(outs, 0, "states", 1, kMaxRows));
  FV_RETURN_IF_ERROR(check_axis_range(outs, 1, "rows", 0, kMaxRows));
  FV_RETURN_IF_ERROR(check_axis_range(outs, 2, "heads", 1, kMaxHeads));
  FV_RETURN_IF_ERROR(check_axis_range(outs, 3, "head_dim", 1, INT32_MAX));
  FV_RETURN_IF_ERROR(check_tensor(lses, {3, kFloat32, LastAxis::kStrided}));
  FV_RETURN_IF_ERROR(check_tensor(out, {3, kFloat32}));
  FV_RETURN_IF_ERROR(check_tensor(out_lse, {2, kFloat32, LastAxis::kStrided}));
  static constexpr const char* kMeanings[] = {"states of outs", "rows of outs", "heads of outs",
                                              "head_dim of outs"};
  for (int32_t axis = 0; axis < 4; ++axis) {
    const int64_t expected = params->outs.shape[axis];
    const char* meaning = kMeanings[axis];
    if (axis < 3) FV_RETURN_IF_ERROR(check_axis(lses, axis, expected, meaning));
    if (axis > 0) FV_RETURN_IF_ERROR(check_axis(out, axis - 1, expected, meaning));
    if (axis > 0 && axis < 3) FV_RETURN_IF_ERROR(check_axis(out_lse, axis - 1, expected, meaning));
  }

  problem->states = params->outs.shape[0];
  problem->rows = params->outs.shape[1];
  problem->heads = params->outs.shape[2];
  problem->head_dim = params->outs.shape[3];
  problem->outs = static_cast<const float*>(params->outs.data);
  problem->lses = static_cast<const float*>(params->lses.data);
  problem->out = static_cast<float*>(params->out.data);
  problem->out_lse = static_cast<float*>(params->out_lse.data);
  for (int32_t axis = 0; axis < 3; ++axis) {
    problem->outs_stride[axis] = axis_stride(params->outs, axis);
    problem->lses_stride[axis] = axis_stride(params->lses, axis);
  }
  for (int32_t axis = 0; axis < 2; ++axis) {
    problem->out_stride[axis] = axis_stride(params->out, axis);
    problem->out_lse_stride[axis] = axis_stride(params->out_lse, axis);
  }
  return check_memory(*params);
}

}  // namespace flashverify::abi
