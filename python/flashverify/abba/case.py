"""The geometry of one experiment, its limits, and what it costs in bytes and operations."""

import dataclasses
import math
from pathlib import Path

from flashverify.abba.outcome import UsageError

KV_ELEMENT_BYTES = {"e4m3": 1, "e5m2": 1, "fp16": 2, "bf16": 2}

# What the library accepts (docs/abi.md), so that a slip is told before any work.
RANGES = {
    "context": (1, 2**31 - 1),
    "q_len": (1, 64),
    "q_heads": (1, 65536),
    "kv_heads": (1, 65536),
    "head_dim": (1, 512),
    "page_size": (1, 65536),
    "batch": (1, 65536),
}

# Tokens that the workload and the FP64 reference hold in wide types at a time.
CHUNK_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """``batch`` equal requests of ``context`` keys, the last ``q_len`` of them being verified."""

    context: int = 262144
    q_len: int = 8
    q_heads: int = 6
    kv_heads: int = 1
    head_dim: int = 256
    page_size: int = 3296
    batch: int = 1
    kv_dtype: str = "e4m3"

    def check(self) -> None:
        """Raises UsageError for the first value outside its range."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(f"--{name}={value}: accepted are {low} to {high}")
        if self.kv_dtype not in KV_ELEMENT_BYTES:
            known = ", ".join(KV_ELEMENT_BYTES)
            raise UsageError(f"--kv_dtype={self.kv_dtype}: known are {known}")
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"--q_heads={self.q_heads} is not a multiple of --kv_heads={self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query tokens over all requests."""
        return self.batch * self.q_len

    @property
    def pages_per_request(self) -> int:
        """Pages that hold one request's keys."""
        return -(-self.context // self.page_size)

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def kv_live_bytes(self) -> int:
        """Key and value bytes that a pass has to read: those before seq_len."""
        tokens = self.batch * self.context
        return 2 * tokens * self.kv_heads * self.head_dim * KV_ELEMENT_BYTES[self.kv_dtype]

    @property
    def kv_allocated_bytes(self) -> int:
        """Key and value bytes of all pages, the unused end of each last page included."""
        return self.kv_live_bytes // self.context * self.pages_per_request * self.page_size

    @property
    def visible_keys_per_request(self) -> int:
        """Keys that a request's query tokens see, summed over those tokens (causal)."""
        hidden = range(self.q_len)
        return sum(max(0, self.context - count) for count in hidden)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, visible keys only."""
        return 4 * self.batch * self.visible_keys_per_request * self.q_heads * self.head_dim

    def memory_parts_bytes(self, *, peers: tuple[str, ...] = ()) -> dict[str, int]:
        """Peak memory of a run by what needs it."""
        head_rows = self.q_len * self.group
        parts = {
            "KV cache": self.kv_allocated_bytes,
            "queries and outputs": 32 * self.rows * self.q_heads * self.head_dim,
            # One KV head of one request: K and V, then scores, probabilities and the mask.
            "FP32 reference": 4 * self.context * (2 * self.head_dim + 3 * head_rows),
            "chunks in wide types": 64 * CHUNK_TOKENS * max(self.kv_heads, 2) * self.head_dim,
        }
        if "torch" in peers:
            tokens = self.batch * self.context * self.kv_heads
            parts["peer torch"] = 4 * tokens * (3 * self.head_dim + 3 * head_rows)
        return parts

    def check_memory(self, available_bytes: int, *, peers: tuple[str, ...] = ()) -> None:
        """Raises UsageError where the run would need more than ``available_bytes``."""
        parts = self.memory_parts_bytes(peers=peers)
        needed = sum(parts.values())
        if needed > available_bytes:
            words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
            raise UsageError(
                f"this case needs {format_bytes(needed)} of memory ({words}), "
                f"and this machine has {format_bytes(available_bytes)} to give: "
                "make --context, --batch or the head counts smaller"
            )


def format_bytes(size: int) -> str:
    """``size`` with a binary unit, to three digits."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.0f} PiB"


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take, under the machine's and the container's limit."""
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((root / "sys/fs/cgroup" / limit_file).read_text())
        except (OSError, ValueError):  # no such controller, or the limit is "max"
            continue
        available = min(available, limit)
    return available
