"""Where the tests run, and how they call: one source for every device and instruction set."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashverify as fv
from tests.support import cases, tolerances

FP32_ROUTES = ("grouped_fp32", "scalar_fp32")
HALF_ROUTES = ("grouped_half", "scalar_half", "xqa_half")
GROUPED_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A device, and the instruction set or the device code to use (None: its best)."""

    device: str
    isa: str | None = None
    image: str | None = None

    def __str__(self) -> str:
        return "-".join(part for part in (self.device, self.isa, self.image) if part)

    @functools.cached_property
    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""
        if self.device == "cuda":
            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
            if not fv.native_info()["cuda_images"]:
                return "this build of flashverify has no CUDA image"
            if self.image not in (None, *fv.native_info()["cuda_images"]):
                return f"this build of flashverify has no {self.image} image"
        elif self.isa is not None and self.isa not in fv.available_cpu_isas():
            return f"this CPU has no {self.isa}"
        return None

    @contextlib.contextmanager
    def selected(self, threads: int | None = None) -> Iterator[None]:
        """Makes calls inside use the instruction set or device code, and so many threads."""
        chosen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.isa is not None:
            chosen = fv.cpu_isa_override(self.isa)
        elif self.image is not None:
            chosen = fv.cuda_image_override(self.image)
        before = fv.get_num_threads()
        fv.set_num_threads(threads or before)
        try:
            with chosen:
                yield
        finally:
            fv.set_num_threads(before)


def _parameters(*backends: Backend) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "backend",
        [
            pytest.param(
                backend,
                id=str(backend),
                marks=pytest.mark.skipif(backend.missing is not None, reason=str(backend.missing)),
            )
            for backend in backends
        ],
    )


CPU = Backend("cpu")
CUDA = Backend("cuda")
# The oldest source and the newest portable one, as the driver compiles them for this device.
CUDA_IMAGES = (
    Backend("cuda", image="compute_70"),
    Backend("cuda", image="compute_89"),
)
on_every_device = _parameters(CPU, CUDA)
on_cuda = _parameters(CUDA, *CUDA_IMAGES)
on_every_backend = _parameters(
    Backend("cpu", "portable"),
    Backend("cpu", "avx2"),
    Backend("cpu", "avx512"),
    CUDA,
    *CUDA_IMAGES,
)


def has_grouped(backend: Backend, q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether the grouped routes compute such queries and caches on the backend."""
    head_dim = q.shape[-1]
    if head_dim not in GROUPED_HEAD_DIMS:
        return False
    if backend.device == "cpu":
        return True
    # Tensor cores: rows of 256 elements, 16-bit operands, BF16 times BF16 alone and not on SM70.
    if head_dim > 256 or q.dtype == torch.float32:
        return False
    # Two tiles of 128 such rows are more than the shared memory of sm_89.
    if backend.image == "compute_89" and head_dim * cache.element_size() > 256:
        return False
    if cache.dtype != torch.bfloat16:
        return True
    return q.dtype == torch.bfloat16 and backend.image != "compute_70"


def half_weights(backend: Backend, cache: torch.Tensor) -> float:
    """Unit roundoff of the weights of the half routes: of the tensor cores' operand on CUDA."""
    bfloat16 = backend.device == "cuda" and cache.dtype == torch.bfloat16
    return tolerances.UNIT_ROUNDOFF[torch.bfloat16 if bfloat16 else torch.float16]


def fp32_routes(backend: Backend, q: torch.Tensor, cache: torch.Tensor) -> list[str]:
    """The routes with FP32 state that compute such queries and caches on the backend."""
    grouped = has_grouped(backend, q, cache)
    return [route for route in FP32_ROUTES if grouped or route.startswith("scalar")]


def routes_for(case: cases.Case, backend: Backend = CPU) -> list[str]:
    """Every route that computes the case on the backend."""
    grouped = has_grouped(backend, case.q, case.k_cache)
    rows, batch = len(case.q), len(case.seq_lens)
    starts = case.query_start_loc
    longest = rows // max(batch, 1) if starts is None else int(starts.diff().max())
    decode = longest <= 1
    return [
        route
        for route in FP32_ROUTES + HALF_ROUTES
        if (grouped or route.startswith("scalar")) and (decode or route != "xqa_half")
    ]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a call wrote, on the CPU."""

    out: torch.Tensor
    lse: torch.Tensor


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, with its strides and the bytes between its elements."""
    if device == "cpu":
        return tensor
    storage = tensor.untyped_storage()
    elements = storage.nbytes() // tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (elements,), (1,))
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def arguments(case: cases.Case, device: str = "cpu") -> dict[str, Any]:
    """The case as arguments of flashverify.paged_attention, all by name."""
    named = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
        "query_start_loc": case.query_start_loc,
        **case.options,
    }
    return {
        name: on_device(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in named.items()
    }


def attend(
    case: cases.Case,
    backend: Backend = CPU,
    *,
    route: str = "grouped_fp32",
    out_dtype: torch.dtype | None = None,
    threads: int | None = None,
) -> Result:
    """Runs the case by the named route, into an output that was NaN before."""
    if route not in routes_for(case, backend):
        pytest.skip(f"{backend} does not compute {case.q.dtype} by {case.k_cache.dtype} in {route}")
    out = cases.poisoned_storage(out_dtype or case.q.dtype, *case.q.shape).to(backend.device)
    with backend.selected(threads):
        returned, lse = fv.paged_attention(
            **arguments(case, backend.device), route=fv.Route(route), out=out, return_lse=True
        )
        assert str(fv.last_route()) == route
    assert returned.data_ptr() == out.data_ptr()
    return Result(out.cpu(), lse.cpu())


def assert_same_bits(actual: Result, expected: Result, what: object = "") -> None:
    """Outputs and LSEs equal as bits: -0.0 is not 0.0, and NaN is itself."""
    for name in ("out", "lse"):
        ours, theirs = (cases.bits(getattr(result, name)) for result in (actual, expected))
        assert ours.shape == theirs.shape, (name, what)
        different = (ours != theirs).nonzero()
        assert len(different) == 0, (
            f"{what}: {len(different)} of {ours.numel()} elements of {name} differ in their bits, "
            f"first {different[0].tolist()}"
        )
