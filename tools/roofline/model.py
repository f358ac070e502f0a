"""The predicted time of a grouped launch on a V100: a model, not a measurement.

Each resource's bound is what the counted work takes at that resource's full rate.
The prediction adds the phases of a tile, which barriers part, each as long as its
slowest resource takes at `EFFICIENCY` of its rate, and lays the tiles out over the
multiprocessors as the schedule does.
"""

import math
import re
from dataclasses import dataclass

from tools.roofline.sass import Kernel, Mix

UNIT_TOKENS = 128
CHAIN = 8
WARPS = 8
SUB_PARTITIONS = 4

# Assumed, not read from the code: what a phase reaches of its bound; a barrier and
# the latencies that nothing hides, each of five times a tile; instructions of a tile
# outside the counted stretches (fetches, exchanged scores, the vote); what a launch
# and the wait for the last block cost.
EFFICIENCY = 0.8
BARRIER_CYCLES = 120
BARRIERS = 5
OTHER_INSTRUCTIONS = 350
LAUNCH_US = 8.0


@dataclass(frozen=True)
class Device:
    """Rates of a GPU, per multiprocessor and cycle where not said otherwise."""

    name: str
    multiprocessors: int
    clock_ghz: float
    memory_gb_per_s: float
    # Of one sub-partition and warp instruction: an HMMA.884 step has a quarter of
    # a product, of eight cycles; the special unit has a lane in eight.
    hmma_cycles: float = 2.0
    special_cycles: float = 8.0


# The 16 GB card's data sheet: 125 TFLOP/s, 900 GB/s.
V100 = Device("V100-SXM2", 80, 1.53, 900.0)


@dataclass(frozen=True)
class Case:
    """A verification call with an FP8 cache, every request alike."""

    label: str
    batch: int
    length_tokens: int
    query_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    splits: int = 128

    @property
    def rows(self) -> int:
        """Rows of one KV head of one request."""
        return self.query_len * self.q_heads // self.kv_heads

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that the call attends."""
        return 2 * self.batch * self.length_tokens * self.kv_heads * self.head_dim


CASES = (
    Case("B1 256K q8 Hq6 Hkv1 D256", 1, 262144, 8, 6, 1, 256),
    Case("B1 256K q1 Hq6 Hkv1 D256", 1, 262144, 1, 6, 1, 256),
    Case("B1 64K q8 Hq6 Hkv1 D256", 1, 65536, 8, 6, 1, 256),
    Case("B1 16K q8 Hq6 Hkv1 D256", 1, 16384, 8, 6, 1, 256),
    Case("B1 4K q8 Hq6 Hkv1 D256", 1, 4096, 8, 6, 1, 256),
    Case("B8 32K q8 Hq6 Hkv1 D256", 8, 32768, 8, 6, 1, 256),
    Case("B16 16K q8 Hq32 Hkv8 D128", 16, 16384, 8, 32, 8, 128),
    Case("B64 4K q1 Hq32 Hkv8 D128", 64, 4096, 1, 32, 8, 128),
    Case("B1 128K q16 Hq24 Hkv4 D256", 1, 131072, 16, 24, 4, 256),
)


@dataclass(frozen=True)
class Shape:
    """An instance's geometry, from its name and device/grouped_geometry_sm70.h."""

    legacy: bool
    dim: int
    tile_rows: int

    @classmethod
    def of(cls, kernel: str) -> "Shape":
        """The shape that a kernel's name tells."""
        match = re.fullmatch(r"grouped_(fp32|half)_\w+_d(\d+)_r(\d+)", kernel)
        if match is None:
            raise ValueError(f"{kernel}: not the name of a grouped kernel")
        return cls(match[1] == "half", int(match[2]), int(match[3]))

    @property
    def keys_hmma(self) -> int:
        """HMMA steps of a warp for Q K of one tile: four a product of 32 x 8 x 4."""
        return 4 * (self.tile_rows // 8) * (self.dim // 2 // 4)

    @property
    def values_hmma(self) -> int:
        """The same for P V."""
        products = self.dim // 32 * (self.tile_rows // 8) * (UNIT_TOKENS // 4)
        return 4 * products * (1 if self.legacy else 2) // WARPS

    @property
    def folds_in_memory(self) -> bool:
        """Whether registers hold no second set of sums."""
        return self.dim * self.tile_rows // (32 * WARPS) > 32

    @property
    def partial_bytes(self) -> int:
        """Of one part of one row tile."""
        return self.tile_rows * (self.dim * (2 if self.legacy else 4) + 8)


def fold(case: Case, shape: Shape, device: Device) -> int:
    """The splits that a work item folds, as native/cuda/grouped_plan.cc plans them."""
    tiles = case.batch * case.kv_heads * math.ceil(case.rows / shape.tile_rows)
    for candidate in (case.splits, CHAIN):
        whole = candidate == case.splits
        if candidate > case.splits or (whole and shape.legacy):
            continue
        if candidate > 1 and shape.folds_in_memory and (whole or candidate > CHAIN or shape.legacy):
            continue
        items = tiles * (case.splits // candidate)
        slots = math.ceil(items / device.multiprocessors) * device.multiprocessors
        if items * 10 >= slots * 9:
            return candidate
    return 1


def busiest_tiles(case: Case, shape: Shape, device: Device) -> int:
    """Tiles of the multiprocessor that has the most."""
    folded = fold(case, shape, device)
    parts = case.splits // folded
    units = math.ceil(case.length_tokens / UNIT_TOKENS)
    per_split = [units // case.splits + (s < units % case.splits) for s in range(case.splits)]
    row_tiles = case.batch * math.ceil(case.rows / shape.tile_rows)
    items = [
        sum(per_split[part * folded : (part + 1) * folded])
        for _ in range(row_tiles)
        for part in reversed(range(parts))
        for _ in range(case.kv_heads)
    ]
    return max(sum(items[sm :: device.multiprocessors]) for sm in range(device.multiprocessors))


@dataclass(frozen=True)
class Bounds:
    """Cycles that a phase takes each resource of a multiprocessor."""

    hmma: float
    shared: float
    issue: float
    special: float

    def __add__(self, other: "Bounds") -> "Bounds":
        return Bounds(
            self.hmma + other.hmma,
            self.shared + other.shared,
            self.issue + other.issue,
            self.special + other.special,
        )

    def slowest(self) -> float:
        """Cycles of the resource that takes longest."""
        return max(self.hmma, self.shared, self.issue, self.special)


def _bounds(mix: Mix, turns: float, device: Device) -> Bounds:
    warps = WARPS / SUB_PARTITIONS
    return Bounds(
        mix.hmma * turns * warps * device.hmma_cycles,
        mix.shared_wavefronts * turns * WARPS,
        mix.total * turns * warps,
        mix.special * turns * warps * device.special_cycles,
    )


@dataclass(frozen=True)
class Prediction:
    """Microseconds: each resource's bound, and the model's time."""

    dram_us: float
    hmma_us: float
    shared_us: float
    issue_us: float
    predicted_us: float
    limit: str


def predict(case: Case, kernel: Kernel, device: Device = V100) -> Prediction:
    """The time of a case run by a kernel.

    Raises:
      ValueError: the kernel's HMMA do not make whole tiles of its shape.
    """
    shape = Shape.of(kernel.name)
    turns = shape.values_hmma / kernel.values.hmma
    if kernel.keys.hmma != shape.keys_hmma or turns != int(turns):
        raise ValueError(
            f"{kernel.name}: {kernel.keys.hmma} and {kernel.values.hmma} HMMA, where the shape "
            f"has {shape.keys_hmma} and a divisor of {shape.values_hmma}"
        )
    phases = (
        _bounds(kernel.keys, 1, device),
        _bounds(kernel.softmax, 1, device)
        + Bounds(0.0, 0.0, OTHER_INSTRUCTIONS * WARPS / SUB_PARTITIONS, 0.0),
        _bounds(kernel.values, turns, device),
    )
    total = phases[0] + phases[1] + phases[2]
    tile_cycles = sum(p.slowest() for p in phases) / EFFICIENCY + BARRIERS * BARRIER_CYCLES
    tiles = busiest_tiles(case, shape, device)
    us = tiles / (device.clock_ghz * 1e3)  # of one cycle a tile
    folded = fold(case, shape, device)
    row_tiles = case.batch * math.ceil(case.rows / shape.tile_rows)
    parts = row_tiles * case.kv_heads * case.splits // folded if folded < case.splits else 0
    partial_us = 2 * parts * shape.partial_bytes / (device.memory_gb_per_s * 1e3)
    dram_us = case.cache_bytes / (device.memory_gb_per_s * 1e3)
    compute_us = tile_cycles * us
    # A launch that waits for memory reads at what a plain copy reaches.
    memory_us = dram_us / EFFICIENCY
    return Prediction(
        dram_us,
        total.hmma * us,
        total.shared * us,
        total.issue * us,
        max(compute_us, memory_us) + partial_us + LAUNCH_US,
        "memory" if memory_us > compute_us else "tiles",
    )


def choose(case: Case, names: list[str], route: str) -> str:
    """The kernel that the plan takes: the least head_dim, then the rows that fit."""
    shapes = {name: Shape.of(name) for name in names}
    fitting = [
        name
        for name, shape in shapes.items()
        if shape.dim >= case.head_dim and shape.legacy == (route == "half")
    ]
    if not fitting:
        raise ValueError(f"{case.label}: no kernel for head_dim {case.head_dim}")
    dim = min(shapes[name].dim for name in fitting)
    of_dim = sorted(
        (name for name in fitting if shapes[name].dim == dim),
        key=lambda name: shapes[name].tile_rows,
    )
    return next((n for n in of_dim if shapes[n].tile_rows >= case.rows), of_dim[-1])
