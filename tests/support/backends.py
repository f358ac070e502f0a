"""Where the tests run, and how they call: one source for every device and instruction set."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashverify as fv
from tests.support import cases

FP32_ROUTES = ("grouped_fp32", "scalar_fp32")
HALF_ROUTES = ("grouped_half", "scalar_half", "xqa_half")
GROUPED_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A device and, on the CPU, the instruction set to use (None: the best one)."""

    device: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.device if self.isa is None else f"{self.device}-{self.isa}"

    @functools.cached_property
    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""
        if self.device == "cuda":
            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
            if not fv.native_info()["cuda_images"]:
                return "this build of flashverify has no CUDA image"
        elif self.isa is not None and self.isa not in fv.available_cpu_isas():
            return f"this CPU has no {self.isa}"
        return None

    @contextlib.contextmanager
    def selected(self, threads: int | None = None) -> Iterator[None]:
        """Makes calls inside use the instruction set and so many threads."""
        isa = contextlib.nullcontext() if self.isa is None else fv.cpu_isa_override(self.isa)
        before = fv.get_num_threads()
        fv.set_num_threads(threads or before)
        try:
            with isa:
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
on_every_device = _parameters(CPU, CUDA)
on_every_backend = _parameters(
    Backend("cpu", "portable"), Backend("cpu", "avx2"), Backend("cpu", "avx512"), CUDA
)


def routes_for(case: cases.Case) -> list[str]:
    """Every route that supports the case's shape."""
    grouped = case.q.shape[-1] in GROUPED_HEAD_DIMS
    decode = int(case.query_start_loc.diff().max()) <= 1
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
