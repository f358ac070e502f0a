"""When a call must go through torch's dispatcher, and what it refuses of autograd.

An eager call on plain tensors goes straight to the native library: the
dispatcher would cost more than a whole small call. Whatever traces, fakes,
transforms or intercepts goes through the registered op instead, or it would not
see the call at all.
"""

from __future__ import annotations

from typing import Any

import torch

from flashverify.errors import UnsupportedError

_Tensor = torch.Tensor
_no_dispatch = torch.Tensor.__torch_dispatch__
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
# torch has no public question for these; all exist from 2.6 on.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_forward_ad = torch.autograd.forward_ad
_unpack_dual: Any = _forward_ad.unpack_dual
_trace = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_COUNTS_OFFSETS_TWICE = torch.__version__ < "2.13"  # a TorchVersion: no comparison of text


def must_dispatch(first: object, second: object, third: object) -> bool:
    """Whether a call with these tensors must go through the registered op."""
    if _is_compiling():
        return True
    if _dispatch_modes() or _transform() is not None or _trace() is not None:
        return True
    if type(first) is type(second) is type(third) is _Tensor:
        return False
    return any(
        isinstance(tensor, _Tensor) and type(tensor).__torch_dispatch__ is not _no_dispatch
        for tensor in (first, second, third)
    )


def refuse_late_graph_inputs(
    k_cache: torch.Tensor,  # noqa: ARG001 - read by the tracer
    v_cache: torch.Tensor,  # noqa: ARG001
) -> None:
    """Refuses caches that torch.compile would write in the wrong place.

    Inductor before torch 2.13 takes what a mutating op writes for a strided view of the graph's
    input, and counts the view's start from that input's, where it should count from the
    storage's. So an input with a storage offset is at fault (such as half of a [pages, 2, ...]
    tensor); a view that is taken of one inside the graph is right.

    Raises:
      UnsupportedError: While the caller is traced; torch wraps it in an error of its own.
    """
    if _COUNTS_OFFSETS_TWICE and _is_compiling():
        from torch._dynamo.comptime import comptime  # loaded by now; at import it takes seconds

        comptime(_look_for_late_inputs)


def _look_for_late_inputs(context: Any) -> None:
    """Runs in the tracer, and sees the locals of `refuse_late_graph_inputs`."""
    for name in ("k_cache", "v_cache"):
        variable = context.get_local(name)
        if not variable.is_proxy():
            continue
        root = variable.as_proxy().node
        while (parent := _viewed(root)) is not None:
            root = parent
        example = root.meta.get("example_value")
        is_input = root.op in ("placeholder", "get_attr") and isinstance(example, _Tensor)
        if is_input and example.storage_offset() != 0:
            raise UnsupportedError(
                f"{name}: a storage offset of {example.storage_offset()} elements, as an input of "
                f"code that torch {torch.__version__} compiles; accepted: a tensor that begins its "
                "storage (its views may be taken inside the compiled code), a call that is not "
                "compiled (a captured CUDA graph is none), or torch 2.13 and newer"
            )


def _viewed(node: Any) -> Any:
    """The node whose memory this node's tensor shares; None where it has its own."""
    parent = node.args[0] if node.args else None
    if not isinstance(parent, torch.fx.Node):
        return None
    own, its = node.meta.get("example_value"), parent.meta.get("example_value")
    if not isinstance(own, _Tensor) or not isinstance(its, _Tensor):
        return parent  # one of several views: unbind's, for example
    shared = own.untyped_storage()._cdata == its.untyped_storage()._cdata
    return parent if shared else None


def may_differentiate(*arguments: object) -> bool:
    """Whether autograd might follow a call with these arguments: the cheap first look."""
    if _forward_ad._current_level >= 0:
        return True
    if not _is_grad_enabled():
        return False
    for value in arguments:  # noqa: SIM110 - any() over a generator costs 0.3 us more
        if value is not None and getattr(value, "requires_grad", False):
            return True
    return False


def refuse_autograd(**arguments: object) -> None:
    """Raises `UnsupportedError` if autograd would have to follow the call, either way."""
    backward, forward = torch.is_grad_enabled(), _forward_ad._current_level >= 0
    if not backward and not forward:
        return
    for name, value in arguments.items():
        if not isinstance(value, _Tensor):
            continue
        if (backward and value.requires_grad) or (forward and _has_tangent(value)):
            raise UnsupportedError(
                f"{name}: requires grad; accepted: tensors that do not, or a call under "
                "torch.no_grad() or torch.inference_mode() (nothing here is differentiated)"
            )


def _has_tangent(tensor: torch.Tensor) -> bool:
    unpacked: Any = _unpack_dual(tensor)
    return unpacked.tangent is not None
