"""Which transformers this integration knows."""

from __future__ import annotations

from typing import Final

import transformers

from flashverify.errors import UnsupportedError

SUPPORTED: Final = ((5, 19),)
"""Releases whose interfaces were tried: major and minor."""


def check(version: str = transformers.__version__) -> None:
    """Refuses a release whose attention, mask and cache interfaces were not tried.

    Raises:
      UnsupportedError: It is none of `SUPPORTED`.
    """
    if tuple(version.split(".")[:2]) not in {tuple(map(str, known)) for known in SUPPORTED}:
        accepted = ", ".join(f"{major}.{minor}.*" for major, minor in SUPPORTED)
        raise UnsupportedError(
            f"transformers: version {version}; accepted: {accepted}, whose interfaces this "
            "version of flashverify was tried with"
        )
