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
