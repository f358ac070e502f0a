#include <nanobind/nanobind.h>

#include <cstdint>

#include "python/bindings/api.h"
#include "python/bindings/errors.h"
#include "python/bindings/module.h"
#include "python/bindings/tensor.h"

namespace nb = nanobind;

namespace flashverify::bindings {
namespace {

constexpr ArgumentSpec kOuts{"outs", "float32 [n, rows, heads, head_dim]"};
constexpr ArgumentSpec kLses{"lses", "float32 [n, rows, heads]"};
constexpr ArgumentSpec kOut{"out", "float32 [rows, heads, head_dim]"};
constexpr ArgumentSpec kOutLse{"out_lse", "float32 [rows, heads]"};

void merge_states(nb::handle outs, nb::handle lses, nb::handle out, nb::handle out_lse,
                  int32_t num_threads, uintptr_t stream, nb::handle cuda_image) {
  CallDevice device;
  const TensorArgument outs_argument(outs, kOuts, &device);
  const TensorArgument lses_argument(lses, kLses, &device);
  const TensorArgument out_argument(out, kOut, &device);
  const TensorArgument out_lse_argument(out_lse, kOutLse, &device);

  fv_merge_params params{};
  params.struct_size = sizeof params;
  params.device_type = device.type;
  params.device_index = device.index;
  params.num_threads = num_threads;
  params.stream = reinterpret_cast<void*>(stream);
  if (device.type == FV_DEVICE_CUDA) params.cuda_image = name_or_null(cuda_image);
  params.outs = outs_argument.view();
  params.lses = lses_argument.view();
  params.out = out_argument.view();
  params.out_lse = out_lse_argument.view();
  fv_status status;
  {
    nb::gil_scoped_release release;
    status = api().merge_states(&params);
  }
  raise_unless_ok(status);
}

}  // namespace

void bind_merge(nb::module_& module) {
  using nb::arg;
  module.def("merge_states", &merge_states, arg("outs").none(), arg("lses").none(),
             arg("out").none(), arg("out_lse").none(), arg("num_threads"), arg("stream"),
             arg("cuda_image").none(),
             "Merges partial results into out and out_lse. The GIL is released.");
}

}  // namespace flashverify::bindings
