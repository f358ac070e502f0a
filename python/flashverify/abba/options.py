"""The command line."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from flashverify.abba.case import Case
from flashverify.abba.outcome import UsageError

ROUTES = ("grouped_fp32", "scalar_fp32", "grouped_half", "scalar_half", "xqa_half")
DEVICES = ("auto", "cpu", "cuda")
PEERS = ("torch", "flashinfer")

_CASE_FLAGS = tuple(field.name for field in dataclasses.fields(Case))
_QUICK = {"context": 16384, "warmups": 3, "blocks": 5}

_DESCRIPTION = """\
abba: times two routes of flashverify in A B B A blocks over the same cache bytes, scales
and query, and measures each one's error against FP64.

Writes abba.json, abba.md and abba.png. Exit codes: 0 done, 1 the result could not be
written, 2 bad arguments, 3 the arms' native dependencies differ, 4 an arm could not run,
130 interrupted.

flags:
"""


class HelpRequested(Exception):  # noqa: N818 - no error
    """--help was given; the text is the only argument."""


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


def _caller_folder() -> Path:
    """Where the user stands, which `bazel run` leaves for the runfiles."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())


def _as_seen(path: Path) -> str:
    """A path for others to read: from the caller's folder, where it lies below that."""
    folder = _caller_folder().absolute()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _define() -> flags.FlagValues:
    values: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]
    case = Case()

    def integer(name: str, default: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, flag_values=values)

    def string(name: str, default: str, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    string("device", "auto", f"Where the arms run: {', '.join(DEVICES)}.")
    integer("context", case.context, "Keys that each request's last query row sees.")
    integer("q_len", case.q_len, "Query tokens per request.")
    integer("q_heads", case.q_heads, "Query heads.")
    integer("kv_heads", case.kv_heads, "KV heads; divides --q_heads.")
    integer("head_dim", case.head_dim, "Elements of a head.")
    integer("page_size", case.page_size, "Tokens per page.")
    integer("batch", case.batch, "Requests.")
    string("kv_dtype", case.kv_dtype, "Cache storage: e4m3, e5m2, fp16, bf16.")
    string("arm_a", "grouped_half", f"Route of arm A: {', '.join(ROUTES)}.")
    string("arm_b", "grouped_fp32", "Route of arm B.")
    string("arm_a_root", "", "Folder that holds arm A's flashverify package; empty: this one.")
    string("arm_b_root", "", "Folder that holds arm B's flashverify package; empty: this one.")
    integer("warmups", 20, "Untimed calls of each arm before the first block.")
    integer("blocks", 25, "ABBA blocks; each times both arms twice.")
    integer("seed", 0, "Seed of the synthetic data, page order and bootstrap.")
    string("peers", "", f"Comma-separated others to measure as well: {', '.join(PEERS)}.")
    string("cache", "", "Real cache contents, as docs/cache_file_format.md describes.")
    string("cuda_image", "", "Device code that the arms run, as compute_70; empty: the device's.")
    string("schedule", "", "How positions are split, as n16 on CUDA; empty: the default.")
    string("out", "", "Folder of the result; empty: a new one under flashverify-results/.")
    flags.DEFINE_boolean(
        "quick", False, "16384 keys, 3 warm-ups, 5 blocks, unless given.", flag_values=values
    )
    flags.DEFINE_boolean("help", False, "Shows this text.", flag_values=values)
    return values


def parse(arguments: Sequence[str]) -> Options:
    """Options of the arguments after the program's name.

    Raises UsageError with one message for whatever cannot be meant, HelpRequested for
    ``--help``.
    """
    values = _define()
    try:
        positional = values(["abba", *arguments])[1:]
    except flags.Error as error:
        raise UsageError(str(error).replace("\n", " ")) from error
    if values["help"].value:
        raise HelpRequested(_DESCRIPTION + values.get_help())
    if positional:
        raise UsageError(f"unexpected argument {positional[0]!r}: all arguments are --flag=value")

    def value(name: str) -> object:
        flag = values[name]
        if values["quick"].value and not flag.present and name in _QUICK:
            return _QUICK[name]
        return flag.value

    def number(name: str, low: int, high: int) -> int:
        found = value(name)
        assert isinstance(found, int)
        if not low <= found <= high:
            raise UsageError(f"--{name}={found}: accepted are {low} to {high}")
        return found

    def choice(name: str, known: Sequence[str]) -> str:
        found = str(value(name))
        if found not in known:
            raise UsageError(f"--{name}={found}: known are {', '.join(known)}")
        return found

    def named(name: str, pattern: str, known: str) -> str | None:
        found = str(value(name))
        if found and not re.fullmatch(pattern, found):
            raise UsageError(f"--{name}={found}: known are {known}")
        return found or None

    # `bazel run` starts the program in its runfiles and says where the caller stood.
    caller_folder = _caller_folder()

    def path(name: str) -> Path | None:
        text = str(value(name))
        return Path(os.path.normpath(caller_folder / Path(text).expanduser())) if text else None

    case = Case(**{name: value(name) for name in _CASE_FLAGS})  # type: ignore[arg-type]
    peers = tuple(dict.fromkeys(name for name in str(value("peers")).split(",") if name))
    for name in peers:
        if name not in PEERS:
            raise UsageError(f"--peers={name}: known are {', '.join(PEERS)}")
    for name in ("arm_a_root", "arm_b_root"):
        root = path(name)
        if root is not None and not (root / "flashverify/__init__.py").is_file():
            raise UsageError(f"--{name}={root}: no flashverify package there")
    options = Options(
        case=case,
        device=choice("device", DEVICES),
        arm_a=choice("arm_a", ROUTES),
        arm_b=choice("arm_b", ROUTES),
        arm_a_root=path("arm_a_root"),
        arm_b_root=path("arm_b_root"),
        warmups=number("warmups", 0, 10**6),
        blocks=number("blocks", 1, 10**6),
        seed=number("seed", 0, 2**63 - 1),
        peers=peers,
        cache=path("cache"),
        out=path("out"),
        quick=bool(values["quick"].value),
        cuda_image=named("cuda_image", r"(sm|compute)_\d+a?", "sm_NN or compute_NN"),
        schedule=named("schedule", r"c1024|n(1|2|4|8|16|32|64|128)", "c1024, n1 to n128"),
        command=shlex.join(["abba", *arguments]),
        given_case_flags=frozenset(name for name in _CASE_FLAGS if values[name].present),
        caller_folder=caller_folder,
    )
    if options.cache is None:
        options.check_case()
    return options
