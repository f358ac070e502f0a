"""The texts of a run: from files, or one that repeats itself."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashverify.abba.outcome import UsageError

REPETITIVE = "repetitive"
_COLOURS = ("red", "green", "blue", "white", "black")


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids of a text of ``context`` tokens: ``prompt`` and what came after it."""

    name: str
    ids: tuple[int, ...]
    prompt_tokens: int

    @property
    def prompt(self) -> list[int]:
        """What the model is to go on with."""
        return list(self.ids[: self.prompt_tokens])

    def sha256(self) -> str:
        """Digest of all token ids, as decimal words."""
        return hashlib.sha256(" ".join(map(str, self.ids)).encode()).hexdigest()


def read(wanted: Sequence[str], folder: Path) -> dict[str, str]:
    """Texts by name, of ``repetitive`` or ``name=file[,file...]``; raises UsageError."""
    texts = {}
    for item in wanted:
        name, is_file, files = item.partition("=")
        if name in texts:
            raise UsageError(f"--texts: {name!r} twice")
        if not is_file:
            if name != REPETITIVE:
                raise UsageError(
                    f"--texts={item}: expected name=file or name=file,file; or {REPETITIVE}"
                )
            texts[name] = "".join(itertools.islice(_lines(), 4096))
            continue
        try:
            parts = [(folder / file).read_text(encoding="utf-8") for file in files.split(",")]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--texts={item}: {error}") from error
        texts[name] = "\n".join(parts)
    return texts


def cut(name: str, ids: Sequence[int], context: int, max_tokens: int) -> Text:
    """The first ``context`` tokens, the last ``max_tokens`` of them left to be generated.

    Raises UsageError for a text that is shorter.
    """
    if len(ids) < context:
        raise UsageError(f"--texts: {name} has {len(ids)} tokens; --context={context} needs more")
    return Text(name, tuple(ids[:context]), context - max_tokens)


def _lines() -> Iterator[str]:
    """A log that repeats itself with small changes, as tables and code do."""
    for number in itertools.count(1):
        first, second = _COLOURS[number % 5], _COLOURS[(number // 5) % 5]
        yield f"Item {number}: the {first} box stands on the {second} shelf.\n"
