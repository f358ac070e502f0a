"""How far from the exact answer an implementation may be, and why.

Two bounds, both needed. The element-wise one is rigorous, to first order in the unit
roundoff u: no order of summation can exceed it, so that it never fails by chance. It
grows with the number of terms, though, and real errors with its square root. The
row-wise one therefore compares with a second reference, the same formulas in FP32 in
another order; beside it stand four roundings of each score, which that reference is
spared where its products happen to be exact. Both are per row: no row can hide behind
the others.

Element-wise, with M = sum |q_d k_d| x scale (Answer.score_magnitude), n visible keys,
and A = the weighted average over |v| (Answer.out_magnitude):

    a score is off by at most          (head_dim + 32) u M + 8 u softcap
    a weight, relative, by that and    64 u for exp and the rescales
    a sum of n terms by                n u of the sum of magnitudes
    the output by                      A (2 x weight + n u) + its one rounding

The half routes add, by their definition, 2^-11 for each weight (twice, if only the
numerator is rounded), 2^-11 for each normalised partial, and the absolute errors of
FP16 subnormals.
"""

import dataclasses
import functools

import torch

from tests.oracle import attention as oracle
from tests.support import cases

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
_U = UNIT_ROUNDOFF[torch.float32]
_HALF = UNIT_ROUNDOFF[torch.float16]


def rounding_error(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """At most this is lost by one rounding of exact to dtype, element by element."""
    return (exact.abs() * UNIT_ROUNDOFF[dtype]).clamp(min=_SMALLEST[dtype] / 2)


def rounding_floor(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Relative L2 error of the exact answer rounded once to dtype."""
    return relative_l2(exact.to(dtype), exact)


def relative_l2(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The error of the whole over the norm of the whole."""
    return float((actual.to(torch.float64) - exact).norm() / exact.norm())


def row_relative_l2(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """[rows, heads]: every row's error over its own norm."""
    return (actual.to(torch.float64) - exact).norm(dim=-1) / exact.norm(dim=-1)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The oracle's answer to a case, with what the bounds need."""

    case: cases.Case
    exact: oracle.Answer
    plain: oracle.Answer  # the same formulas in FP32

    def check(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        half_partials: bool = False,
        half_weights: float = _HALF,
        what: str = "",
    ) -> None:
        """Asserts that out and lse are the answer within both bounds; NaN matches NaN.

        ``half_weights`` is the unit roundoff of the weights that the half routes round.
        """
        exact, exact_lse = self.exact.out, self.exact.lse
        magnitude, score_magnitude = self.exact.out_magnitude, self.exact.score_magnitude
        assert magnitude is not None and score_magnitude is not None

        keys = int(self.case.seq_lens.max())
        head_dim = self.case.q.shape[-1]
        softcap = float(self.case.options.get("softcap", 0.0))
        weight_error = _U * ((head_dim + 32) * score_magnitude + 8 * softcap + 64)
        sum_error = _U * (keys + 64)
        element_error = magnitude * (2 * weight_error[..., None] + sum_error)
        lse_error = weight_error + sum_error + 4 * _U * exact_lse.abs().nan_to_num(posinf=0.0)
        if half_partials:
            subnormals = (keys + 1) * 2.0**-25 * self._largest_value
            rounded = (2 * half_weights + _HALF) * magnitude + subnormals
            element_error = element_error + rounded
            lse_error = lse_error + _HALF
        rounding = rounding_error(exact, out.dtype)
        _assert_within(lse, exact_lse, lse_error, f"{what}: LSE")
        _assert_within(out, exact, element_error + rounding, f"{what}: output")

        ordinary = torch.isfinite(exact).all(-1)
        row_error = (out.to(torch.float64) - exact).norm(dim=-1)
        plain_error = (self.plain.out - exact).norm(dim=-1)
        score_error = _U * (4 * (score_magnitude + softcap) + 16)
        row_bound = 4 * plain_error + score_error * magnitude.norm(dim=-1) + rounding.norm(dim=-1)
        if half_partials:
            row_bound = row_bound + rounded.norm(dim=-1)
        over = ordinary & (row_error > row_bound)
        assert not over.any(), (
            f"{what}: rows {over.nonzero().tolist()[:8]} have L2 errors "
            f"{row_error[over][:8].tolist()}, bounds {row_bound[over][:8].tolist()}"
        )

    @functools.cached_property
    def _largest_value(self) -> float:
        values = oracle.decode(self.case.v_cache, self.case.options.get("kv_dtype"))
        values = values.abs().nan_to_num(nan=0.0, posinf=0.0)
        scale = self.case.options.get("v_dequant_scale")
        largest_scale = 1.0 if scale is None else float(torch.as_tensor(scale).abs().max())
        return float(values.max()) * largest_scale


def expected(case: cases.Case) -> Expected:
    """Runs the oracle twice: in FP64 with the bounds' magnitudes, and in FP32."""
    return Expected(
        case, exact=case.expected(with_bounds=True), plain=case.expected(dtype=torch.float32)
    )


def _assert_within(
    actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, what: str
) -> None:
    actual = actual.to(torch.float64)
    finite = torch.isfinite(exact)
    same_special = (actual == exact) | (torch.isnan(actual) & torch.isnan(exact))
    close = (actual - exact).abs() <= bound
    wrong = ~torch.where(finite, close, same_special)
    if wrong.any():
        where = wrong.nonzero().tolist()
        first = tuple(where[0])
        raise AssertionError(
            f"{what} is wrong in {len(where)} of {wrong.numel()} places, first {first}: "
            f"{float(actual[first])!r}, exact {float(exact[first])!r}, "
            f"allowed difference {float(bound[first])!r}"
        )
