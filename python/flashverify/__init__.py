"""flashverify: attention for speculative-decoding verification, with FP32 state.

The import checks the native files first (flashverify.precision) and fails with
`StaleNativeLibraryError` where they are not the ones this package was built with.
"""

from flashverify.errors import (
    DeviceError,
    FlashVerifyError,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    OutOfRangeError,
    RouteError,
    StaleNativeLibraryError,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from flashverify.precision import ABI_VERSION, PRECISION_REVISION, load_native

load_native()

# ruff: noqa: E402 - nothing below may be imported before the gate has answered.
from flashverify import _ops
from flashverify.attention import paged_attention
from flashverify.dflash2 import DFlash2Config
from flashverify.dtypes import resolve_kv_cache_dtype
from flashverify.info import native_info
from flashverify.kv_cache import append_kv, check_append_faults
from flashverify.logits import lm_head_logits
from flashverify.proof import last_route, require_route, route_counts
from flashverify.routing import Route, RoutePlan, RouteRequest, SpeculativeMethod, plan_route
from flashverify.runtime import (
    available_cpu_isas,
    cpu_isa,
    cpu_isa_override,
    cuda_image_override,
    get_num_threads,
    last_cuda_image,
    set_num_threads,
)
from flashverify.state import merge_states
from flashverify.workspace import Workspace

__version__ = "4.0.0"

__all__ = [
    "ABI_VERSION",
    "PRECISION_REVISION",
    "DFlash2Config",
    "DeviceError",
    "FlashVerifyError",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "Route",
    "RouteError",
    "RoutePlan",
    "RouteRequest",
    "SpeculativeMethod",
    "StaleNativeLibraryError",
    "UnsupportedError",
    "Workspace",
    "WorkspaceTooSmallError",
    "append_kv",
    "available_cpu_isas",
    "check_append_faults",
    "cpu_isa",
    "cpu_isa_override",
    "cuda_image_override",
    "get_num_threads",
    "last_cuda_image",
    "last_route",
    "lm_head_logits",
    "merge_states",
    "native_info",
    "paged_attention",
    "plan_route",
    "require_route",
    "resolve_kv_cache_dtype",
    "route_counts",
    "set_num_threads",
]
del _ops
