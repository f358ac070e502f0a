"""What a user may set, in vLLM's ``additional_config`` under the key ``flashverify``.

The configuration of the engine is the one place: it reaches every worker process, and
is part of what the engine hashes and logs. No environment variable is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from flashverify.errors import InvalidArgumentError
from flashverify.proof import parse_route
from flashverify.routing import Route

KEY: Final = "flashverify"
SCHEDULES: Final = tuple(f"n{1 << power}" for power in range(8))
"""The named schedules of CUDA devices, by their number of splits."""


@dataclass(frozen=True)
class Options:
    """The options of one engine.

    Attributes:
      route: The route to run; None lets `flashverify.plan_route` choose (FP32 state).
      row_invariant_linears: Whether the engine's one-row bfloat16 linears on a CPU are
        computed as two rows, which makes a token's bits those it has in a larger batch.
      fp32_logits: Whether the LM head gives FP32 logits; None: with DFlash2 only.
      schedule: How keys are cut into splits on CUDA, as `flashverify.Workspace` takes it;
        None: from the number of requests that the engine serves at once.
    """

    route: Route | None = None
    row_invariant_linears: bool = False
    fp32_logits: bool | None = None
    schedule: str | None = None

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Options:
        """Reads the engine's ``additional_config``.

        Args:
          additional_config: A mapping, whose key "flashverify" holds an object with
            fields of this class, or no such key; or None.

        Raises:
          InvalidArgumentError: A field that is none of this class's, or a value that
            it does not take.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            return cls()
        argument = f"additional_config[{KEY!r}]"
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(
                f"{argument}: {given!r}; accepted: an object with {', '.join(known)}"
            )
        for name in given:
            if name not in known:
                raise InvalidArgumentError(
                    f"{argument}: {name!r} is no option; accepted: {', '.join(known)}"
                )
        route = given.get("route")
        schedule = given.get("schedule")
        if schedule is not None and schedule not in SCHEDULES:
            raise InvalidArgumentError(
                f"{argument}['schedule']: {schedule!r}; accepted: {', '.join(SCHEDULES)}"
            )
        return cls(
            schedule=schedule,
            route=None if route is None else parse_route(route, f"{argument}['route']"),
            row_invariant_linears=_flag(argument, given, "row_invariant_linears") or False,
            fp32_logits=_flag(argument, given, "fp32_logits"),
        )


def _flag(argument: str, given: Mapping[str, object], name: str) -> bool | None:
    value = given.get(name)
    if value is None or value is True or value is False:
        return value
    raise InvalidArgumentError(f"{argument}[{name!r}]: {value!r}; accepted: true, false or null")
