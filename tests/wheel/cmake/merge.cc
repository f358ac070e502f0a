// Merges two partial results of equal weight: the output is their mean.
#include <flashverify/flashverify.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iostream>

namespace {

fv_tensor float_tensor(float* data, std::initializer_list<int64_t> shape) {
  fv_tensor view{};
  view.data = data;
  view.dtype = FV_DTYPE_FLOAT32;
  view.rank = static_cast<int32_t>(shape.size());
  int axis = 0;
  for (int64_t extent : shape) view.shape[axis++] = extent;
  int64_t stride = 1;
  while (axis-- > 0) {
    view.stride[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}

}  // namespace

int main() {
  const fv_api* api = fv_get_api();
  std::array<float, 4> outs = {1.0f, 2.0f, 3.0f, 6.0f};
  std::array<float, 2> lses = {0.0f, 0.0f};
  std::array<float, 2> out = {};
  float lse = 0.0f;

  fv_merge_params params{};
  params.struct_size = sizeof(params);
  params.device_type = FV_DEVICE_CPU;
  params.num_threads = 1;
  params.outs = float_tensor(outs.data(), {2, 1, 1, 2});
  params.lses = float_tensor(lses.data(), {2, 1, 1});
  params.out = float_tensor(out.data(), {1, 1, 2});
  params.out_lse = float_tensor(&lse, {1, 1});
  if (api->merge_states(&params) != FV_OK) {
    std::cerr << "merge_states: " << api->last_error() << '\n';
    return 1;
  }
  std::cout << "merged: " << out[0] << ' ' << out[1] << '\n';
  return out[0] == 2.0f && out[1] == 4.0f && std::fabs(lse - std::log(2.0f)) < 1e-6f ? 0 : 1;
}
