"""The checks of a model A/B, and how each ended."""

import dataclasses
from typing import Any

MEASURED = "measured"
FAILED = "failed"
NOT_RUN = "not run"

# In the order in which they are made. A check that fails keeps those after it that need
# what it checks from being a result.
NAMES = (
    "start_up", "routes", "native_digests", "acceptance", "outputs", "latency",
    "logprob_distance",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: ``measured`` with what was found, ``failed`` or ``not run`` with a reason."""

    status: str
    reason: str | None = None
    found: Any = None

    def to_json(self) -> dict[str, Any]:
        """The check's part of model_ab.json."""
        return dataclasses.asdict(self)


def measured(found: Any) -> Check:
    """A check that was made."""
    return Check(MEASURED, None, found)


def failed(reason: str, found: Any = None) -> Check:
    """A check that was made, and shows that the arms cannot be compared as asked."""
    return Check(FAILED, reason, found)


def not_run(reason: str) -> Check:
    """A check that could not be made."""
    return Check(NOT_RUN, reason)
