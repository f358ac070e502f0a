"""What an sm_70 cubin's kernels hold, read from its machine code.

An instruction is 128 bits; the low nine bits of the first word name the operation.
The hot parts of a grouped kernel show by what they are made of: the first run of
HMMA is Q K, the others are P V, and between them the conversions to FP16 mark the
softmax. Rare code between two runs is left out.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TEXT = ".text."
_HMMA = 0x036
_F2F = 0x104
_CLASSES = {
    _HMMA: "hmma",
    _F2F: "special",
    0x108: "special",  # MUFU
    0x105: "special",  # F2I
    0x106: "special",  # I2F
    0x184: "load_shared",
    0x188: "store_shared",
    0x181: "load_global",
}
# Bits 9 to 11 of the second word: the width of an access.
_WIDTH_BYTES = {4: 4, 5: 8, 6: 16}
# Instructions between two of a run. The loads of an unaligned cache, which stand
# between the halves of P V, are longer.
_GAP = 40


class CubinError(ValueError):
    """The file is no cubin of this tool's kind; the message says why."""


@dataclass(frozen=True)
class Mix:
    """Instructions of a stretch of code, by what they occupy."""

    total: int
    hmma: int
    special: int  # of the unit of a quarter of the rate
    shared_wavefronts: int  # of 128 bytes
    load_global: int

    def __add__(self, other: "Mix") -> "Mix":
        return Mix(
            self.total + other.total,
            self.hmma + other.hmma,
            self.special + other.special,
            self.shared_wavefronts + other.shared_wavefronts,
            self.load_global + other.load_global,
        )


@dataclass(frozen=True)
class Kernel:
    """The hot code of a grouped kernel, as it stands there: loops once."""

    name: str
    instructions: int
    keys: Mix  # Q K of one tile
    softmax: Mix
    values: Mix  # one turn of the loop of P V, or all of it where there is no loop


def _sections(data: bytes) -> list[tuple[str, bytes]]:
    if data[:4] != b"\x7fELF":
        raise CubinError("not an ELF file")
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    return [
        (
            data[strings + h[0] : data.index(b"\0", strings + h[0])].decode(),
            data[h[4] : h[4] + h[5]],
        )
        for h in headers
    ]


def _runs(positions: Iterable[int]) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of positions."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position - runs[-1][1] <= _GAP:
            runs[-1][1] = position + 1
        else:
            runs.append([position, position + 1])
    return [(first, last) for first, last in runs]


def _mix(words: Sequence[tuple[int, int]]) -> Mix:
    counts: Counter[str] = Counter()
    wavefronts = 0
    for low, high in words:
        kind = _CLASSES.get(low & 0x1FF, "other")
        counts[kind] += 1
        if kind in ("load_shared", "store_shared"):
            # A register of a warp is 128 bytes.
            wavefronts += _WIDTH_BYTES.get(high >> 9 & 7, 4) // 4
    return Mix(len(words), counts["hmma"], counts["special"], wavefronts, counts["load_global"])


def _kernel(name: str, code: bytes) -> Kernel:
    words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code), 16)]
    operations = [low & 0x1FF for low, _ in words]
    products = _runs(i for i, op in enumerate(operations) if op == _HMMA)
    if len(products) < 2:
        raise CubinError(f"{name}: {len(products)} runs of HMMA, where Q K and P V make two")
    between = range(products[0][1], products[1][0])
    softmax = max(
        _runs(i for i in between if operations[i] == _F2F),
        key=lambda run: operations[run[0] : run[1]].count(_F2F),
        default=None,
    )
    if softmax is None:
        raise CubinError(f"{name}: no conversion to FP16 between Q K and P V")
    values = [_mix(words[first:last]) for first, last in products[1:]]
    return Kernel(
        name,
        len(words),
        _mix(words[slice(*products[0])]),
        _mix(words[slice(*softmax)]),
        sum(values[1:], values[0]),
    )


def kernels(path: Path) -> list[Kernel]:
    """The grouped kernels of a cubin for sm_70, by name."""
    found = [
        _kernel(name[len(_TEXT) :], code)
        for name, code in _sections(path.read_bytes())
        if name.startswith(_TEXT + "grouped_") and any(code)
    ]
    if not found:
        raise CubinError(f"{path.name}: no grouped kernel")
    return sorted(found, key=lambda kernel: kernel.name)
