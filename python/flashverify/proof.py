"""Proof of route: which kernel family ran, as the native side reports it.

"Present and enabled" is not "in control of the arithmetic". Each call compares
the route that the kernel names with the one that was planned, and raises where
they differ; `require_route` makes any other route an error before it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, NoReturn

from flashverify import _native
from flashverify.errors import InvalidArgumentError, RouteError
from flashverify.routing import Route

ROUTE_CODES: Final[dict[Route, int]] = {
    Route(name): code for name, code in _native.route_codes().items()
}

_last: Final[ContextVar[Route | None]] = ContextVar("flashverify_last_route", default=None)
_required: Final[ContextVar[frozenset[Route] | None]] = ContextVar(
    "flashverify_required_routes", default=None
)


def last_route() -> Route | None:
    """The route of this thread's (or asyncio task's) last call; None before the first."""
    return _last.get()


def route_counts() -> dict[Route, int]:
    """Calls completed per route in this process, as the native library counts them."""
    return {Route(name): count for name, count in _native.route_counts().items()}


def parse_route(value: object, argument: str = "route") -> Route:
    """A route from itself or from its name.

    Raises:
      InvalidArgumentError: Anything else.
    """
    try:
        if isinstance(value, str):
            return Route(value)
    except ValueError:
        pass
    found = " ".join(repr(value).split())[:80]
    raise InvalidArgumentError(f"{argument}: {found}; accepted: {', '.join(Route)}")


@contextlib.contextmanager
def require_route(*routes: Route | str) -> Iterator[None]:
    """Inside, in this thread or asyncio task, any other route is an error.

    A call whose plan is another route raises `RouteError` before it computes
    anything. Requirements nest: the inner one can only narrow the outer.

    Raises:
      InvalidArgumentError: No route given, or a name that is none.
      RouteError: Nothing would satisfy this requirement and the one around it.
    """
    if not routes:
        raise InvalidArgumentError(f"routes: none; accepted: one or more of {', '.join(Route)}")
    required = frozenset(parse_route(route, "routes") for route in routes)
    outer = _required.get()
    if outer is not None:
        if not required & outer:
            raise RouteError(
                f"routes: {_names(required)}; accepted inside this require_route: {_names(outer)}"
            )
        required &= outer
    token = _required.set(required)
    try:
        yield
    finally:
        _required.reset(token)


def check_required(route: Route) -> None:
    """Raises `RouteError` where a requirement around this call rules the route out."""
    required = _required.get()
    if required is not None and route not in required:
        raise RouteError(
            f"route: {route} is planned; accepted inside this require_route: {_names(required)}"
        )


def record(route: Route) -> None:
    """Records the route that ran."""
    _last.set(route)


def refuse(planned: Route, ran_code: int) -> NoReturn:
    """Raises `RouteError`: another route ran than the planned one."""
    ran = next((str(route) for route, code in ROUTE_CODES.items() if code == ran_code), None)
    raise RouteError(
        f"route: {planned} was planned, and the native library reports that "
        f"{ran or f'code {ran_code}'} ran; the output must not be used"
    )


def _names(routes: frozenset[Route]) -> str:
    return ", ".join(sorted(routes))
