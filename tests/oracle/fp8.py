"""FP8 in plain arithmetic: the tests' own tables, written from the formats' definitions.

Nothing here comes from flashverify or from torch's float8 types, so that neither
can vouch for itself.

float8_e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, and
    NaN only where all exponent and mantissa bits are set.
float8_e5m2: 1 sign, 5 exponent (bias 15), 2 mantissa bits; infinities and NaNs as
    in IEEE 754.
"""

import dataclasses
import functools
import math

import torch


@dataclasses.dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format: sign bit, exponent bits, mantissa bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    ieee_specials: bool

    def value_of(self, code: int) -> float:
        """The exact value of one code, by the definition."""
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        top_exponent = (1 << self.exponent_bits) - 1
        if self.ieee_specials and exponent == top_exponent:
            return math.nan if mantissa else sign * math.inf
        if not self.ieee_specials and (code & 0x7F) == 0x7F:
            return math.nan
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        significand = (1 << self.mantissa_bits) + mantissa
        return sign * math.ldexp(significand, exponent - self.bias - self.mantissa_bits)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float64 [256]: the value of every code."""
        return torch.tensor([self.value_of(code) for code in range(256)], dtype=torch.float64)

    @functools.cached_property
    def magnitudes(self) -> torch.Tensor:
        """float64: the finite values of codes 0, 1, 2, ..., which ascend."""
        positive = self.values[:128]
        return positive[torch.isfinite(positive)]

    @functools.cached_property
    def nan_codes(self) -> list[int]:
        """Every code that is NaN."""
        return [code for code in range(256) if math.isnan(self.value_of(code))]

    @property
    def max_finite(self) -> float:
        """The largest finite value."""
        return float(self.magnitudes[-1])

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Exact float64 values of uint8 codes, in the codes' shape."""
        return self.values.to(codes.device)[codes.long()]

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 codes of float values: nearest, ties to even, saturating, NaN kept.

        Codes of one sign ascend with their values, and a code is even where its
        last mantissa bit is 0, so the neighbours of a value are found by search
        and the tie goes to the even code. Which NaN code a NaN gets is left open
        by the contract; this gives the positive one with all bits set.
        """
        exact = values.to(torch.float64)
        magnitude = exact.abs().nan_to_num(nan=0.0, posinf=self.max_finite)
        magnitude = magnitude.clamp(max=self.max_finite)
        above = torch.searchsorted(
            self.magnitudes, magnitude.contiguous()
        )  # magnitudes[above] >= m
        below = (above - 1).clamp(min=0)
        to_above = self.magnitudes[above] - magnitude
        to_below = magnitude - self.magnitudes[below]
        take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        code = torch.where(take_above, above, below)
        code = code | torch.where(torch.signbit(exact), 0x80, 0)
        return torch.where(torch.isnan(exact), 0x7F, code).to(torch.uint8)


E4M3 = Format("fp8_e4m3", exponent_bits=4, mantissa_bits=3, bias=7, ieee_specials=False)
E5M2 = Format("fp8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15, ieee_specials=True)

BY_NAME = {format.name: format for format in (E4M3, E5M2)}
BY_DTYPE = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
