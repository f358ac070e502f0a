"""What a run found, and its form in abba.json (schema 1; docs/abba.md lists the fields)."""

import dataclasses
from typing import Any

from flashverify.abba import floors, probe, reference
from flashverify.abba.native_files import Difference
from flashverify.abba.options import Options
from flashverify.abba.peers import PeerResult
from flashverify.abba.reference import Error
from flashverify.abba.stats import Ratio, Summary
from flashverify.abba.timing import Block

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One arm: the route that the native side says ran, its time, its error, its bits."""

    route: str
    latency_us: Summary
    error: Error
    relative_l2_fp32: float | None
    output_sha256: str
    # Whether the first and the last call gave the same bits.
    output_repeats: bool
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate of the machine over the run, and the time that the pass needs at the best one."""

    best: float
    median: float
    floor_us: float


@dataclasses.dataclass(frozen=True)
class OtherFlush:
    """The same arms with the L2 cache in another state, on CUDA."""

    timer: str
    latency_us: dict[str, Summary]
    ratio: Ratio
    read_us: Summary


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Everything measured in one run."""

    arms: dict[str, ArmResult]
    fp16_rounding_floor: float | None
    fp32_relative_l2: float | None
    read_gb_s: Rate
    matmul_gflop_s: Rate
    ratio: Ratio
    blocks: list[Block]
    timer: str
    inputs: str
    inputs_sha256: dict[str, str]
    peers: dict[str, PeerResult]
    device: str = "cpu"
    other_flushes: dict[str, OtherFlush] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """A run, measured or not."""

    options: Options
    environment: dict[str, object]
    precision_revision: int
    reports: dict[str, probe.Report]
    differences: tuple[Difference, ...] = ()
    reason: str | None = None
    measurement: Measurement | None = None

    def to_json(self) -> dict[str, Any]:
        """The contents of abba.json; fields that were not measured are null."""
        found = self.measurement
        measured: dict[str, Any] = {
            "arms": None,
            "fp16_rounding_floor": None,
            "byte_floor_us": None,
            "bandwidth_gb_s": None,
            "arithmetic_floor_us": None,
            "matmul_gflop_s": None,
            "ratio_b_over_a": None,
            "blocks": [],
            "reference": reference.DESCRIPTION,
            "peers": {},
        }
        if found is not None:
            measured = {
                "arms": {name: _arm(arm) for name, arm in found.arms.items()},
                "fp16_rounding_floor": found.fp16_rounding_floor,
                "fp32_pytorch_relative_l2": found.fp32_relative_l2,
                "byte_floor_us": found.read_gb_s.floor_us,
                "bandwidth_gb_s": found.read_gb_s.best,
                "bandwidth_median_gb_s": found.read_gb_s.median,
                "bandwidth_method": floors.READ_DESCRIPTION[found.device],
                "kv_bytes": self.options.case.kv_live_bytes,
                "arithmetic_floor_us": found.matmul_gflop_s.floor_us,
                "matmul_gflop_s": found.matmul_gflop_s.best,
                "matmul_median_gflop_s": found.matmul_gflop_s.median,
                "matmul_method": floors.MATMUL_DESCRIPTION[found.device],
                "flops": self.options.case.flops,
                "ratio_b_over_a": {
                    "median": found.ratio.median,
                    "ci95": list(found.ratio.ci95) if found.ratio.ci95 else None,
                },
                "blocks": [
                    {
                        "block": block.index,
                        "slots": [dataclasses.asdict(slot) for slot in block.slots],
                        "ratio_b_over_a": block.ratio_b_over_a(),
                    }
                    for block in found.blocks
                ],
                "timer": found.timer,
                "other_flushes": {
                    name: dataclasses.asdict(flush) for name, flush in found.other_flushes.items()
                },
                "inputs": found.inputs,
                "inputs_sha256": found.inputs_sha256,
                "reference": reference.DESCRIPTION,
                "peers": {name: dataclasses.asdict(peer) for name, peer in found.peers.items()},
            }
        return {
            "schema": SCHEMA,
            "status": "measured" if found is not None else "not run",
            "reason": self.reason,
            "command": self.options.command,
            "precision_revision": self.precision_revision,
            "native": self._native(),
            "environment": self.environment,
            "case": self.options.flag_values(),
            **measured,
        }

    def _native(self) -> dict[str, Any]:
        report = next(iter(self.reports.values()), None)
        return {
            "library_sha256": report["library_sha256"] if report else None,
            "extension_sha256": report["extension_sha256"] if report else None,
            "build_id": report["build_id"] if report else None,
            "arms_identical": not self.differences if report else None,
            # By name and digest: a result is for others to read, and where the files
            # lay on this machine tells them nothing.
            "files": [
                {key: file[key] for key in ("name", "sha256", "size_bytes")}
                for file in (report["files"] if report and not self.differences else [])
            ],
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
        }


def _arm(arm: ArmResult) -> dict[str, Any]:
    return {
        "route": arm.route,
        "latency_us": dataclasses.asdict(arm.latency_us),
        "relative_l2": arm.error.relative_l2,
        "max_row_relative_l2": arm.error.max_row_relative_l2,
        "max_abs": arm.error.max_abs,
        "nonfinite_elements": arm.error.nonfinite_elements,
        "relative_l2_fp32": arm.relative_l2_fp32,
        "output_sha256": arm.output_sha256,
        "output_repeats": arm.output_repeats,
        "workspace_bytes": arm.workspace_bytes,
    }
