"""Counters of a vLLM-compatible ``/metrics`` text, and what changed between two texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:"

DRAFTS = "spec_decode_num_drafts_total"
DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "generation_tokens_total"
FINISHED = "request_success_total"
_COUNTERS = (DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_BY_POSITION, GENERATED, FINISHED)
SPECULATION = (DRAFTS, DRAFT_TOKENS, ACCEPTED)

RUNNING = "num_requests_running"
WAITING = "num_requests_waiting"
_GAUGES = (RUNNING, WAITING)

# Written by the client library of the server's language, not by the engine: no prefix.
_STARTED = "process_start_time_seconds"

# Beyond it a float holds no count exactly.
MOST = 2**53
# No engine drafts so many tokens in a block.
_MOST_POSITIONS = 4096

_Labels = frozenset[tuple[str, str]]


class MetricsError(Exception):
    """The text is not in the Prometheus format, or holds a value that no counter has."""


class RestartError(Exception):
    """Counters went backwards or vanished: the server was started anew in between."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The series of one text by family name (without prefix) and labels.

    The order of labels and of lines does not matter. ``_created`` series, with which
    client libraries date a counter, are no counters and are left out.
    """

    series: Mapping[str, Mapping[_Labels, float]]

    def total(self, family: str) -> float | None:
        """Sum over all engines and other labels; None where the family is missing."""
        found = self.series.get(family)
        return sum(found.values()) if found else None

    def missing(self, *families: str) -> list[str]:
        """Those of the families that the text does not have."""
        return [family for family in families if not self.series.get(family)]

    @property
    def in_flight(self) -> int | None:
        """Requests that run or wait; None where the server does not say."""
        totals = [self.total(family) for family in _GAUGES]
        known = [total for total in totals if total is not None]
        return int(sum(known)) if known else None


@dataclasses.dataclass(frozen=True)
class Delta:
    """What was counted between two texts; None where the server has no such family."""

    drafts: int | None
    draft_tokens: int | None
    accepted: int | None
    # Accepted drafts by their place in the block, from 0.
    accepted_by_position: tuple[int, ...] | None
    generated: int | None
    finished: int | None


def whole(value: Any) -> int:
    """A count as a server tells it; ValueError, TypeError or OverflowError for what is none."""
    count = int(value)
    if not 0 <= count <= MOST:
        raise ValueError(f"{str(value)[:40]}, where a count belongs")
    return count


def parse(text: str, prefix: str = PREFIX) -> Snapshot:
    """The counters of a text in the Prometheus format; raises MetricsError.

    ``prefix`` begins the names of the engine's families.
    """
    wanted = {prefix + name: name for name in (*_COUNTERS, *_GAUGES)}
    wanted[_STARTED] = _STARTED
    series: dict[str, dict[_Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = wanted.get(sample.name)
                if name is None:
                    continue
                if not 0 <= sample.value <= MOST:
                    raise MetricsError(f"{sample.name}: {sample.value}, where a count belongs")
                labels = frozenset(sample.labels.items())
                of_name = series.setdefault(name, {})
                if labels in of_name:
                    raise MetricsError(f"{sample.name}{dict(sample.labels)}: twice in one text")
                of_name[labels] = sample.value
    except (KeyError, ValueError) as error:
        raise MetricsError(f"not in the Prometheus text format: {error}") from error
    return Snapshot(series)


def difference(before: Snapshot, after: Snapshot) -> Delta:
    """What was counted from one snapshot to a later one of the same server.

    A series that is new in ``after`` counted from 0. Raises RestartError where a counter
    decreased or vanished, and where the process says that it was started in between.
    """
    started = [snapshot.series.get(_STARTED, {}) for snapshot in (before, after)]
    if all(started) and started[0] != started[1]:
        raise RestartError(f"{_STARTED} changed")
    for family in _COUNTERS:
        found = after.series.get(family, {})
        for labels, value in before.series.get(family, {}).items():
            words = f"{family}{dict(sorted(labels))}"
            if labels not in found:
                raise RestartError(f"{words} vanished")
            if found[labels] < value:
                raise RestartError(f"{words} fell from {value:g} to {found[labels]:g}")

    def counted(family: str) -> int | None:
        total = after.total(family)
        return None if total is None else round(total - (before.total(family) or 0))

    return Delta(
        drafts=counted(DRAFTS),
        draft_tokens=counted(DRAFT_TOKENS),
        accepted=counted(ACCEPTED),
        accepted_by_position=_by_position(before, after),
        generated=counted(GENERATED),
        finished=counted(FINISHED),
    )


def _by_position(before: Snapshot, after: Snapshot) -> tuple[int, ...] | None:
    found = after.series.get(ACCEPTED_BY_POSITION)
    if not found:
        return None
    by_position: dict[int, float] = {}
    for labels, value in found.items():
        try:
            position = int(dict(labels)["position"])
            if not 0 <= position < _MOST_POSITIONS:
                raise ValueError
        except (KeyError, ValueError) as error:
            raise MetricsError(
                f"{ACCEPTED_BY_POSITION}{dict(sorted(labels))}: no label position with a place"
            ) from error
        earlier = before.series.get(ACCEPTED_BY_POSITION, {}).get(labels, 0)
        by_position[position] = by_position.get(position, 0) + value - earlier
    return tuple(round(by_position.get(place, 0)) for place in range(max(by_position) + 1))
