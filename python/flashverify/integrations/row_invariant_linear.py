"""Linear layers whose rows do not depend on how many rows are computed with them.

Attention of flashverify gives a row the same bits whatever is computed beside it. An
engine's own matrix products may not: on CPUs a 16-bit product of one row takes another
kernel, which sums in another order, than one of two rows or more. Then a token that is
decoded alone differs in its last bits from the same token within a verification block,
and greedy text can differ. Computing two rows where one was asked for ends that, at the
cost of one row more. It is an opt-in: it changes the bits of the engine's layers.

Measured with torch 2.13 on x86-64: products of bfloat16 are the same bits per row from two
rows up; those of float32 are not, and two rows do not help them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

import torch

from flashverify.dtypes import dtype_name
from flashverify.errors import InvalidArgumentError, UnsupportedError

ROW_INVARIANT_DTYPES: Final = (torch.bfloat16,)
"""Weight dtypes whose CPU products are row-invariant from two rows up."""


def with_two_rows(linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``linear(x)``; one row alone is computed as the first of two equal rows.

    Args:
      linear: Maps [..., in_features] to [..., out_features], each row by itself.
      x: [..., in_features], any number of leading axes and rows.

    Returns:
      [..., out_features], a view of the larger result where a row was added.
    """
    if x.dim() == 0 or x.numel() != x.shape[-1]:
        return linear(x)
    pair = linear(x.reshape(1, -1).expand(2, -1).contiguous())
    return pair[:1].reshape(*x.shape[:-1], pair.shape[-1])


class RowInvariantLinears:
    """Every `torch.nn.Linear` of a model computes two rows where it is given one.

    The model is changed in place, and changed back by `restore` or at the end of a
    ``with`` block.

    Attributes:
      names: Qualified names of the layers concerned, in the model's order.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Changes the model.

        Raises:
          InvalidArgumentError: The model has no linear layer, or is changed already.
          UnsupportedError: A layer's device or dtype is not known to be row-invariant
            from two rows up; no layer was changed.
        """
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        if not found:
            raise InvalidArgumentError(
                f"model: {type(model).__name__} without a torch.nn.Linear; accepted: a model "
                "with one or more"
            )
        for name, module in found.items():
            _check(name, module)
        self._modules = found
        self.names = tuple(found)
        for module in found.values():
            # An instance's attribute hides the method of its class.
            vars(module)["forward"] = _padded(module.forward)

    def restore(self) -> None:
        """Gives the layers their own computation back; a second call does nothing."""
        for module in self._modules.values():
            del vars(module)["forward"]
        self._modules = {}

    def __enter__(self) -> RowInvariantLinears:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()


def _check(name: str, module: torch.nn.Linear) -> None:
    weight = module.weight
    if weight.device.type != "cpu":
        raise UnsupportedError(
            f"model: {name}.weight on {weight.device}; accepted: cpu, where the products of two "
            "rows and more are known to be row-invariant"
        )
    if weight.dtype not in ROW_INVARIANT_DTYPES:
        accepted = ", ".join(map(dtype_name, ROW_INVARIANT_DTYPES))
        raise UnsupportedError(
            f"model: {name}.weight of {dtype_name(weight.dtype)}; accepted: {accepted}, whose "
            "products are row-invariant from two rows up"
        )
    if "forward" in vars(module):
        raise InvalidArgumentError(
            f"model: {name}.forward was replaced already; accepted: layers with the forward of "
            "their class"
        )


def _padded(
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    def padded_forward(input: torch.Tensor) -> torch.Tensor:
        return with_two_rows(forward, input)

    return padded_forward
