"""Prompts: from a file, or a few of several kinds."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashverify.abba.outcome import UsageError
from tools.acceptance.server import Prompt


@dataclasses.dataclass(frozen=True)
class PromptCase:
    """One prompt: text or token ids, and request parameters of its own."""

    name: str
    prompt: Prompt
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


DEFAULT = (
    PromptCase("free", "The old lighthouse keeper looked out at the sea and"),
    PromptCase("list", "1. red\n2. green\n3. blue\n4. red\n5. green\n6. blue\n7. red\n8."),
    PromptCase(
        "code",
        "def area_of_square(side):\n    return side * side\n\n"
        "def area_of_rectangle(width, height):\n    return",
    ),
    PromptCase("question", "Question: Why is the sky blue?\nAnswer:"),
)


def read(path: Path) -> tuple[PromptCase, ...]:
    """Prompts of a file: JSON lines where it ends in ``.jsonl``, else a prompt a line.

    A JSON line is a string, a list of token ids, or an object with ``prompt`` (one of
    these), ``name`` if wanted, and further request parameters. Raises UsageError.
    """
    try:
        # Not by every character that ends a line in Unicode: JSON has some of them in texts.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts: cannot read {path}: {error}") from error
    cases = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        default = f"line {number}"
        cases.append(
            _json_case(where, default, line)
            if path.suffix == ".jsonl"
            else PromptCase(default, line)
        )
    if not cases:
        raise UsageError(f"--prompts: {path} holds no prompt")
    return tuple(cases)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _json_case(where: str, default_name: str, line: str) -> PromptCase:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    parameters: dict[str, Any] = {}
    if isinstance(value, dict):
        parameters = value
        value = parameters.pop("prompt", None)
    name = str(parameters.pop("name", default_name))
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not value or not (isinstance(value, str) or is_ids):
        raise UsageError(f"{where}: expected a prompt, which is text or a list of token ids")
    for taken in ("model", "stream"):
        if taken in parameters:
            raise UsageError(f"{where}: {taken!r} is not a prompt's to choose")
    return PromptCase(name, value, parameters)
