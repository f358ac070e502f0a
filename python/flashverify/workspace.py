"""Workspaces: the one memory that a call uses beyond its inputs and outputs.

A workspace belongs to one device and, on CUDA, to one stream; layers that run
one after another share it. FP32 partial states and legacy half-precision
partials lie in buffers of their own, which never alias. It is planned for a
capacity, so that its size is known before anything is allocated, and grows when
a call needs more, except while a CUDA graph is being captured.

Calls that name no workspace use one of the calling thread's own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import Final

import torch
from absl import logging

from flashverify import _native, proof, runtime
from flashverify._arguments import check_count, refuse
from flashverify.dtypes import native_dtype, resolve_kv_cache_dtype
from flashverify.errors import (
    DeviceError,
    InvalidArgumentError,
    OutOfMemoryError,
    OutOfRangeError,
    WorkspaceTooSmallError,
)
from flashverify.routing import Route, plan_route

_DEVICE_CODES: Final = {"cpu": 1, "cuda": 2}
_SCHEDULES: Final = {"cpu": ("c1024",), "cuda": tuple(f"n{2**k}" for k in range(8))}
_FAULTS: Final = {
    1: "seq_lens: above the capacity, max_pages x page_size",
    2: "seq_lens: negative",
    4: "query_start_loc: not ascending within the rows of q",
    8: "page_table: a page that the caches do not have",
    16: "slot_mapping: a slot that the caches do not have",
}

STATES: Final = ("fp32", "half")


def state_of(route: Route) -> str:
    """The kind of partial state that a route keeps: ``"fp32"`` or ``"half"``."""
    return "fp32" if route.keeps_fp32_state else "half"


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # In a thread of its own: a thread whose allocations torch sends to the memory pool of a
    # CUDA graph (torch.compile's mode "reduce-overhead" warms up so) would get memory that the
    # graph takes back. On the same stream, to which the memory then belongs.
    stream = torch.cuda.current_stream(device)

    def allocate() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(allocate).result()


class Buffer:
    """Memory of one state: a byte tensor, its address and its size."""

    __slots__ = ("address", "nbytes", "tensor")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self.tensor = _allocate(nbytes, device)
        except RuntimeError as error:
            raise OutOfMemoryError(f"workspace: {nbytes} bytes on {device}: {error}") from error
        self.address = self.tensor.data_ptr()
        self.nbytes = nbytes


class Workspace:
    """Memory for attention calls on one device, planned for a capacity.

    Args:
      device: Where the calls run.
      batch: Requests of the largest call.
      rows: Query rows of the largest call, over all its requests.
      q_heads: Query heads.
      kv_heads: KV heads.
      head_dim: Elements of one head.
      max_seq_len: Keys of the longest request.
      page_size: Tokens of one page.
      routes: The routes that will run; None is the one that `plan_route` chooses.
        Each kind of state among them gets a buffer.
      q_dtype: float32, float16 or bfloat16.
      kv_dtype: The cache's dtype, as `resolve_kv_cache_dtype` takes it.
      schedule: How positions are cut into splits, which decides the bits of every
        call with this workspace: on CUDA "n1" to "n128" by powers of two, the number
        of splits that 128-token units are dealt to. None is "n128", which suits a
        single request; large batches are faster with fewer. The CPU has "c1024".

    Attributes:
      device: The device.
      schedule: The schedule's name.
      nbytes: Bytes that the planned buffers take together.
      state_nbytes: The same for ``"fp32"`` and ``"half"`` state.

    One workspace may be used from several threads: their calls then take turns.

    Raises:
      InvalidArgumentError, UnsupportedError: No route named could run a call of
        this capacity.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        batch: int,
        rows: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        page_size: int = 16,
        routes: Iterable[Route | str] | None = None,
        q_dtype: torch.dtype = torch.float16,
        kv_dtype: str | torch.dtype = "fp8",
        schedule: str | None = None,
    ) -> None:
        self._start(device, schedule)
        for name, value, least in (
            ("batch", batch, 1),
            ("rows", rows, 0),
            ("q_heads", q_heads, 1),
            ("kv_heads", kv_heads, 1),
            ("head_dim", head_dim, 1),
            ("max_seq_len", max_seq_len, 0),
            ("page_size", page_size, 1),
        ):
            check_count(name, value, least)
        q_len = -(-rows // batch)
        kv_cache_dtype = resolve_kv_cache_dtype(kv_dtype, model_dtype=q_dtype)
        if routes is None:
            plan = plan_route(
                device_type=self.device.type,
                capability=capability_of(self.device),
                kv_cache_dtype=kv_cache_dtype,
                q_dtype=q_dtype,
                q_len=q_len,
                head_dim=head_dim,
                group=max(q_heads // kv_heads, 1),
                page_size=page_size,
            )
            routes = (plan.route,)
        for route in routes:
            route = proof.parse_route(route, "routes")
            needed = _native.planned_workspace_bytes(
                route=proof.ROUTE_CODES[route],
                device_type=_DEVICE_CODES[self.device.type],
                device_index=self.device.index or 0,
                q_dtype=native_dtype(q_dtype),
                kv_dtype=native_dtype(kv_cache_dtype),
                batch=batch,
                # The layout depends on rows and batch, not on who has how many.
                rows=q_len * batch,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                max_pages=-(-max_seq_len // page_size),
                cpu_isa=runtime.current_isa_code(),
                num_threads=runtime.get_num_threads(),
                cuda_image=runtime.current_cuda_image(),
                splits=self.splits,
            )
            state = state_of(route)
            self.state_nbytes[state] = max(self.state_nbytes[state], needed)

    def _start(self, device: str | torch.device, schedule: str | None = None) -> None:
        self.device = resolve_device(device)
        kind = self.device.type
        schedules = _SCHEDULES[kind]
        self.schedule = schedules[-1] if schedule is None else schedule
        if self.schedule not in schedules:
            refuse("schedule", repr(schedule), f"None, {', '.join(schedules)} on {kind}")
        self.splits = 0 if kind == "cpu" else int(self.schedule[1:])
        self.state_nbytes = dict.fromkeys(STATES, 0)
        self.buffers: dict[str, Buffer] = {}
        self._outgrown: list[Buffer] = []
        # Re-entrant: a signal handler may make a call between two bytecodes of one.
        self.lock = threading.RLock()
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    @classmethod
    def unplanned(
        cls, device: str | torch.device = "cpu", *, schedule: str | None = None
    ) -> Workspace:
        """A workspace without a capacity, which grows as calls need it."""
        workspace = cls.__new__(cls)
        workspace._start(device, schedule)
        return workspace

    def check_faults(self) -> None:
        """Raises for what calls with this workspace found wrong on the device.

        Lengths, offsets and pages in device memory are read when a call runs, and
        not by the host. Rows whose length or offsets are unusable come out as NaN,
        those of an unusable page hold no result, and this says why. It waits for the
        device; on the CPU, where every call is checked before it runs, it does
        nothing.

        Raises:
          OutOfRangeError: Values were out of range since the last check.
        """
        with self.lock:
            buffers = [*self.buffers.values(), *self._outgrown]
            check_faults(self.device, [buffer.address for buffer in buffers])

    @property
    def nbytes(self) -> int:
        """Bytes of all planned buffers together."""
        return sum(self.state_nbytes.values())

    def allocate(self) -> None:
        """Allocates what is planned; without it, the first call of each state does.

        A CUDA graph can only be captured over a workspace that is allocated.
        """
        with self.lock:
            for state, nbytes in self.state_nbytes.items():
                if nbytes > 0:
                    self.grow(state, nbytes)

    def grow(self, state: str, nbytes: int) -> Buffer:
        """The buffer of a state, made anew where it is smaller than needed or planned.

        Raises:
          WorkspaceTooSmallError: It must grow, and a CUDA graph is being captured.
        """
        found = self.buffers.get(state)
        if found is not None and found.nbytes >= nbytes:
            return found
        planned = self.state_nbytes[state]
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WorkspaceTooSmallError(
                f"workspace: {found.nbytes if found else 0} bytes of {state} state during a CUDA "
                f"graph capture; accepted: {nbytes} or more, allocated before it"
            )
        if planned < nbytes:
            if planned > 0:
                logging.info(
                    "workspace: %s state grows from %d to %d bytes, beyond its plan",
                    state, planned, nbytes,
                )  # fmt: skip
            self.state_nbytes[state] = planned = nbytes
        old = self.buffers.pop(state, None)
        if old is not None and self.device.type == "cuda":
            # A captured graph may still run over it. Doubled, so that all that is kept takes no
            # more than the buffer that serves.
            self._outgrown.append(old)
            self.state_nbytes[state] = planned = max(planned, 2 * old.nbytes)
        del old  # elsewhere it goes first: the two need not exist side by side
        self.buffers[state] = buffer = Buffer(planned, self.device)
        return buffer

    def __repr__(self) -> str:
        sizes = ", ".join(f"{state} {nbytes} bytes" for state, nbytes in self.state_nbytes.items())
        return f"Workspace({str(self.device)!r}: {sizes})"


def resolve_device(device: object) -> torch.device:
    """The device as tensors name it: "cuda" is the current one, by its index.

    Raises:
      InvalidArgumentError: No device that anything here runs on.
      DeviceError: There is no such device on this machine.
    """
    named = None
    if isinstance(device, (str, torch.device)):
        with contextlib.suppress(RuntimeError):
            named = torch.device(device)
    if named is None or named.type not in _DEVICE_CODES:
        refuse("device", repr(device), ", ".join(_DEVICE_CODES))
    try:
        return torch.empty(0, device=named).device
    except (AssertionError, RuntimeError) as error:
        raise DeviceError(f"device: {device}: {error}") from error


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def check_faults(device: torch.device, addresses: Iterable[int]) -> None:
    """Raises for what calls with workspaces at these addresses found wrong.

    Raises:
      OutOfRangeError: Values in device memory were out of range since the last check.
    """
    if device.type != "cuda":
        return
    bits = 0
    for address in addresses:
        bits |= _native.cuda_faults(device.index or 0, address)
    if bits:
        found = [text for bit, text in _FAULTS.items() if bits & bit]
        raise OutOfRangeError("; ".join(found) + ", on the device; accepted: values in range")


_handles: Final = itertools.count(1)
_by_handle: Final[weakref.WeakValueDictionary[int, Workspace]] = weakref.WeakValueDictionary()
_of_thread: Final = threading.local()


def _stream_of(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Without an object for the stream, which takes 2 us; a torch without CUDA has no such function.
_raw_stream: Final = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def current_stream(device: torch.device) -> int:
    """The address of the device's current stream; 0 off CUDA."""
    if device.type != "cuda":
        return 0
    return int(_raw_stream(device.index))


def default_workspace(device: torch.device, stream: int) -> Workspace:
    """The calling thread's own workspace for a device and a stream of it."""
    try:
        found: Workspace = _of_thread.workspaces[device, stream]
    except AttributeError:
        _of_thread.workspaces = {}
    except KeyError:
        pass
    else:
        return found
    workspace = Workspace.unplanned(device)
    _of_thread.workspaces[device, stream] = workspace
    return workspace


def check_workspace(value: object, device: torch.device) -> None:
    """Refuses what is no workspace, or lies on another device.

    Raises:
      InvalidArgumentError: It does.
    """
    if not isinstance(value, Workspace):
        refuse("workspace", type(value).__name__, "None or a Workspace")
    if value.device != device:
        refuse("workspace", f"on device {value.device}", f"{device}, the device of q")


def workspace_of_handle(handle: int) -> Workspace:
    """The live workspace of a handle, by which compiled graphs name it.

    Raises:
      InvalidArgumentError: It is gone.
    """
    workspace = _by_handle.get(handle)
    if workspace is None:
        raise InvalidArgumentError(
            f"workspace: handle {handle} is of a workspace that no longer exists; accepted: a "
            "Workspace kept alive as long as the compiled code that uses it"
        )
    return workspace
