"""What speculation did for one request, or for several together."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tools.acceptance.counters import Delta, whole


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Counts of verification: a draft is one block of draft tokens.

    ``accepted_by_position`` counts blocks whose draft at that place was accepted, from
    place 0; None where the server does not count them.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_by_position: tuple[int, ...] | None

    @property
    def rate(self) -> float | None:
        """Accepted share of the draft tokens; None without any."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_length(self) -> float | None:
        """Tokens that a block yields on average, the target's own included; None without any."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def rate_by_position(self) -> tuple[float, ...] | None:
        """Share of the blocks whose draft at each place was accepted."""
        if self.accepted_by_position is None or not self.drafts:
            return None
        return tuple(count / self.drafts for count in self.accepted_by_position)

    def to_json(self) -> dict[str, Any]:
        """The counts and what follows from them."""
        return {
            **dataclasses.asdict(self),
            "rate": self.rate,
            "mean_length": self.mean_length,
            "rate_by_position": self.rate_by_position,
        }


def from_counters(delta: Delta) -> Speculation | None:
    """Speculation of a difference of counters; None where the server does not count it."""
    if delta.drafts is None or delta.draft_tokens is None or delta.accepted is None:
        return None
    return Speculation(delta.drafts, delta.draft_tokens, delta.accepted, delta.accepted_by_position)


def from_response(metrics: Mapping[str, Any] | None) -> Speculation | None:
    """Speculation that the answer to a request tells of itself; None where it does not."""
    found = (metrics or {}).get("speculative_decoding")
    if not isinstance(found, Mapping):
        return None
    try:
        histogram = [whole(count) for count in found["acceptance_histogram"]]
        return Speculation(
            drafts=whole(found["num_spec_steps"]),
            draft_tokens=whole(found["num_draft_tokens"]),
            accepted=whole(found["num_accepted_draft_tokens"]),
            # histogram[n] blocks had exactly n drafts accepted, which are the first n.
            accepted_by_position=tuple(
                sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def total(parts: Iterable[Speculation]) -> Speculation | None:
    """The parts together; None where there are none."""
    found = list(parts)
    if not found:
        return None
    positions = [part.accepted_by_position for part in found]
    summed: tuple[int, ...] | None = None
    known = [counts for counts in positions if counts is not None]
    if len(known) == len(found):
        longest = max(map(len, known))
        summed = tuple(
            sum(counts[place] for counts in known if place < len(counts))
            for place in range(longest)
        )
    return Speculation(
        drafts=sum(part.drafts for part in found),
        draft_tokens=sum(part.draft_tokens for part in found),
        accepted=sum(part.accepted for part in found),
        accepted_by_position=summed,
    )
