"""The command line."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from flashverify.abba.case import KV_ELEMENT_BYTES, RANGES, Case
from flashverify.abba.command_line import MOST_SEED, Flags, caller_folder
from flashverify.abba.outcome import UsageError

PROGRAM = "abba"

ROUTES = ("grouped_fp32", "scalar_fp32", "grouped_half", "scalar_half", "xqa_half")
DEVICES = ("auto", "cpu", "cuda")
PEERS = ("torch", "flashinfer")

_CASE_FLAGS = tuple(field.name for field in dataclasses.fields(Case))

_DESCRIPTION = """\
abba: times two routes of flashverify in A B B A blocks over the same cache bytes, scales
and query, and measures each one's error against FP64.

Writes abba.json, abba.md and abba.png. Exit codes: 0 done, 1 the result could not be
written, 2 bad arguments, 3 the arms' native dependencies differ, 4 an arm could not run,
130 interrupted.

flags:
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, checked, with paths made absolute."""

    case: Case
    device: str
    arm_a: str
    arm_b: str
    arm_a_root: Path | None
    arm_b_root: Path | None
    warmups: int
    blocks: int
    seed: int
    peers: tuple[str, ...]
    cache: Path | None
    out: Path | None
    quick: bool
    cuda_image: str | None
    schedule: str | None
    command: str
    # Geometry flags that were given, not defaulted: a cache file must agree with them.
    given_case_flags: frozenset[str]
    caller_folder: Path

    def check_case(self) -> None:
        """Raises UsageError for a case that nothing runs, or that an arm can never run."""
        self.case.check()
        for name in ("arm_a", "arm_b"):
            if getattr(self, name) == "xqa_half" and self.case.q_len > 1:
                raise UsageError(
                    f"--{name}=xqa_half decodes one query token per request, "
                    f"and q_len is {self.case.q_len}: use --q_len=1 or another route"
                )

    def with_file_case(self, file_case: Case) -> "Options":
        """These options on the case of a cache file, with which the given flags must agree."""
        for name in sorted(self.given_case_flags):
            given, found = getattr(self.case, name), getattr(file_case, name)
            if given != found:
                raise UsageError(f"--{name}={given} contradicts {self.cache}, which has {found}")
        options = dataclasses.replace(self, case=file_case)
        options.check_case()
        return options

    def flag_values(self) -> dict[str, object]:
        """Every flag with the value that the run uses, for the result."""
        values: dict[str, object] = dataclasses.asdict(self.case)
        for name in ("device", "arm_a", "arm_b", "warmups", "blocks", "seed", "quick"):
            values[name] = getattr(self, name)
        values["peers"] = list(self.peers)
        values["cuda_image"] = self.cuda_image
        values["schedule"] = self.schedule
        for name in ("arm_a_root", "arm_b_root", "cache", "out"):
            path = getattr(self, name)
            values[name] = None if path is None else _as_seen(path)
        return values


def _as_seen(path: Path) -> str:
    """A path for others to read: from the caller's folder, where it lies below that."""
    folder = caller_folder().absolute()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def parse(arguments: Sequence[str]) -> Options:
    """Options of the arguments after the program's name.

    Raises UsageError with one message for whatever cannot be meant, HelpRequested for
    ``--help``.
    """
    found = _flags().parse(arguments)

    def named(name: str, pattern: str, known: str) -> str | None:
        text = str(found.value(name))
        if text and not re.fullmatch(pattern, text):
            raise UsageError(f"--{name}={text}: known are {known}")
        return text or None

    for name in ("arm_a_root", "arm_b_root"):
        root = found.path(name)
        if root is not None and not (root / "flashverify/__init__.py").is_file():
            raise UsageError(f"--{name}={root}: no flashverify package there")
    options = Options(
        case=Case(**{name: found.value(name) for name in _CASE_FLAGS}),
        device=found.value("device"),
        arm_a=found.value("arm_a"),
        arm_b=found.value("arm_b"),
        arm_a_root=found.path("arm_a_root"),
        arm_b_root=found.path("arm_b_root"),
        warmups=found.value("warmups"),
        blocks=found.value("blocks"),
        seed=found.value("seed"),
        peers=found.value("peers"),
        cache=found.path("cache"),
        out=found.path("out"),
        quick=found.value("quick"),
        cuda_image=named("cuda_image", r"(sm|compute)_\d+a?", "sm_NN or compute_NN"),
        schedule=named("schedule", r"c1024|n(1|2|4|8|16|32|64|128)", "c1024, n1 to n128"),
        command=found.command,
        given_case_flags=found.given.intersection(_CASE_FLAGS),
        caller_folder=found.caller_folder,
    )
    if options.cache is None:
        options.check_case()
    return options


def _flags() -> Flags:
    flags = Flags(PROGRAM, _DESCRIPTION)
    case = Case()
    flags.choice("device", "auto", DEVICES, "Where the arms run.")
    for name, text in (
        ("context", "Keys that each request's last query row sees."),
        ("q_len", "Query tokens per request."),
        ("q_heads", "Query heads."),
        ("kv_heads", "KV heads; divides --q_heads."),
        ("head_dim", "Elements of a head."),
        ("page_size", "Tokens per page."),
        ("batch", "Requests."),
    ):
        low, high = RANGES[name]
        flags.integer(name, getattr(case, name), f"{text} {low} to {high}.", low=low, high=high)
    flags.choice("kv_dtype", case.kv_dtype, tuple(KV_ELEMENT_BYTES), "Cache storage.")
    flags.choice("arm_a", "grouped_half", ROUTES, "Route of arm A.")
    flags.choice("arm_b", "grouped_fp32", ROUTES, "Route of arm B.")
    for arm in "ab":
        text = f"Folder that holds arm {arm.upper()}'s flashverify package; empty: this one."
        flags.string(f"arm_{arm}_root", "", text)
    flags.integer("warmups", 20, "Untimed calls of each arm before the first block.", high=10**6)
    flags.integer("blocks", 25, "ABBA blocks; each times both arms twice.", low=1, high=10**6)
    flags.integer("seed", 0, "Seed of the data, the page order and the bootstrap.", high=MOST_SEED)
    flags.choices("peers", (), PEERS, "Comma-separated others to measure as well.")
    flags.string("cache", "", "Real cache contents, as docs/cache_file_format.md describes.")
    flags.string("cuda_image", "", "Device code that the arms run, as compute_70; empty: its own.")
    flags.string("schedule", "", "How positions are split, as n16 on CUDA; empty: the default.")
    flags.quick(
        "16384 keys, 3 warm-ups, 5 blocks, unless given.", context=16384, warmups=3, blocks=5
    )
    return flags
