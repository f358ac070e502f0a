"""Which vLLM this integration knows, by its version and by what it must offer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NoReturn

from flashverify.errors import UnsupportedError

SUPPORTED: Final = ((0, 32),)
"""Releases whose interfaces were tried: major and minor."""

WITHOUT: Final = "set VLLM_PLUGINS to the plugins to load, without flashverify, to run without it"


def check_version(version: str) -> None:
    """Refuses a vLLM whose backend interface was not tried.

    Builds and forks of a known release pass, whatever follows its first two numbers.

    Raises:
      UnsupportedError: It is of none of the releases in `SUPPORTED`.
    """
    found = re.match(r"(\d+)\.(\d+)(?![0-9])", version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        accepted = ", ".join(f"{major}.{minor}.*" for major, minor in SUPPORTED)
        raise UnsupportedError(
            f"vllm: version {version}; accepted: {accepted}, whose backend interface this version "
            f"of flashverify was tried with; {WITHOUT}"
        )


def check_offers(where: str, offered: Iterable[str], needed: Iterable[str]) -> None:
    """Refuses an interface that lacks a name which this integration uses.

    Args:
      where: What is looked at, for the message.
      offered: The names it has.
      needed: The names it must have.

    Raises:
      UnsupportedError: One is missing.
    """
    missing = sorted(set(needed) - set(offered))
    if missing:
        raise UnsupportedError(
            f"vllm: {where} has no {', '.join(missing)}, which flashverify needs; accepted: "
            f"the interface of vllm {SUPPORTED[-1][0]}.{SUPPORTED[-1][1]}; {WITHOUT}"
        )


def refuse_layer(argument: str, found: str, accepted: str) -> NoReturn:
    """Raises `UnsupportedError` for an attention layer that nothing here computes."""
    raise UnsupportedError(
        f"{argument}: {found}; accepted: {accepted}; flashverify never leaves a layer to another "
        f"backend: {WITHOUT}"
    )
