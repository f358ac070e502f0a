"""Proof of route: plan against report, requirements, counters, and the log."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from absl import logging

import flashverify as fv
from flashverify import _native, proof
from tests.support import backends, cases

HALF = ("grouped_half", "scalar_half", "xqa_half")


def arguments(q_len: int = 1, head_dim: int = 64, kv_dtype: str = "fp8_e4m3") -> dict[str, Any]:
    request = cases.random_request(
        1, q_len=q_len, seq_len=20, q_heads=2, head_dim=head_dim, kv_dtype=kv_dtype
    )
    return backends.arguments(cases.paged([request]))


@pytest.mark.parametrize("route", list(fv.Route))
def test_a_named_route_runs_and_is_counted(route: fv.Route) -> None:
    for name in (route, route.value):
        before = fv.route_counts()
        fv.paged_attention(**arguments(), route=name)
        assert fv.last_route() is route
        after = fv.route_counts()
        assert {r: after[r] - before[r] for r in fv.Route if after[r] != before[r]} == {route: 1}


@pytest.mark.parametrize("q_len", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize(("head_dim", "route"), [(64, "grouped_fp32"), (72, "scalar_fp32")])
def test_the_planned_route_runs(q_len: int, kv_dtype: str, head_dim: int, route: str) -> None:
    called = arguments(q_len, head_dim, kv_dtype)
    fv.paged_attention(**called)
    plan = fv.plan_route(
        device_type="cpu",
        kv_cache_dtype=kv_dtype,
        q_dtype=called["q"].dtype,
        q_len=q_len,
        head_dim=head_dim,
        group=2,
        page_size=16,
        causal=True,
    )
    assert fv.last_route() is plan.route
    assert plan.route == route


def test_a_refused_call_is_not_counted() -> None:
    fv.paged_attention(**arguments())
    before, last = fv.route_counts(), fv.last_route()
    with pytest.raises(fv.OutOfRangeError):
        fv.paged_attention(**arguments() | {"seq_lens": torch.tensor([-1], dtype=torch.int32)})
    assert fv.route_counts() == before and fv.last_route() is last


def test_another_route_than_planned_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native side that reports what nobody asked for."""
    real: Callable[..., int] = _native.paged_attention
    for reported, words in ((proof.ROUTE_CODES[fv.Route.xqa_half], "xqa_half"), (77, "code 77")):
        monkeypatch.setattr(
            _native, "paged_attention", lambda *given, ran=reported: real(*given) and ran
        )
        with pytest.raises(fv.RouteError, match=f"grouped_fp32 was planned.*{words} ran"):
            fv.paged_attention(**arguments())


@pytest.mark.parametrize("named", HALF)
def test_a_requirement_stops_the_call_before_it_runs(named: str) -> None:
    called = arguments()
    out = cases.poisoned_storage(called["q"].dtype, *called["q"].shape)
    before, bits = fv.route_counts(), cases.bits(out).clone()
    with fv.require_route("grouped_fp32"):
        fv.paged_attention(**called)
        with pytest.raises(fv.RouteError, match=f"{named} is planned; accepted.*: grouped_fp32$"):
            fv.paged_attention(**called, route=named, out=out)
    assert torch.equal(cases.bits(out), bits)
    assert fv.route_counts()[fv.Route(named)] == before[fv.Route(named)]
    fv.paged_attention(**called, route=named, out=out)


def test_requirements_nest_and_narrow() -> None:
    scalar, grouped = fv.Route.scalar_fp32, fv.Route.grouped_fp32
    with fv.require_route(scalar, grouped):
        with fv.require_route(grouped, "grouped_half"):
            fv.paged_attention(**arguments())
            for ruled_out in ("scalar_fp32", "grouped_half"):
                with pytest.raises(fv.RouteError):
                    fv.paged_attention(**arguments(), route=ruled_out)
        fv.paged_attention(**arguments(), route=scalar)
        with (
            pytest.raises(fv.RouteError, match="routes: xqa_half; accepted inside"),
            fv.require_route("xqa_half"),
        ):
            pass
    fv.paged_attention(**arguments(), route="xqa_half")


@pytest.mark.parametrize("routes", [(), ("fastest",), (1,), (None,), (["grouped_fp32"],)])
def test_a_requirement_of_no_route(routes: tuple[Any, ...]) -> None:
    with (
        pytest.raises(fv.InvalidArgumentError, match=r"routes: .*accepted: .*grouped_fp32"),
        fv.require_route(*routes),
    ):
        pass


def test_a_requirement_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), fv.require_route("scalar_fp32"):
        raise KeyError
    fv.paged_attention(**arguments())


def test_threads_have_requirements_of_their_own() -> None:
    seen: list[object] = []

    def other() -> None:
        seen.append(fv.last_route())
        fv.paged_attention(**arguments(), route="scalar_half")
        seen.append(fv.last_route())

    with fv.require_route("grouped_fp32"):
        fv.paged_attention(**arguments())
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [None, fv.Route.scalar_half]
        assert fv.last_route() is fv.Route.grouped_fp32


def test_tasks_have_requirements_of_their_own() -> None:
    async def attend(route: str, turns: int) -> None:
        with fv.require_route(route):
            for _ in range(turns):
                fv.paged_attention(**arguments(), route=route)
                await asyncio.sleep(0)
                assert fv.last_route() == route

    async def both() -> None:
        await asyncio.gather(*(attend(route, 5) for route in fv.Route))

    asyncio.run(both())


def test_the_first_use_of_each_shape_class_is_logged() -> None:
    lines: list[str] = []
    handler = logging.get_absl_logger()
    verbosity = logging.get_verbosity()

    class Collector(logging.PythonHandler):
        def emit(self, record: Any) -> None:
            lines.append(record.getMessage())

    collector = Collector()
    handler.addHandler(collector)
    logging.set_verbosity(logging.INFO)
    try:
        # A head_dim that no other test of this file has.
        for q_len in (1, 4, 4, 8):
            fv.paged_attention(**arguments(q_len, head_dim=80))
        fv.paged_attention(**arguments(head_dim=80), route="scalar_fp32")
        fv.paged_attention(**arguments(head_dim=80, kv_dtype="bfloat16"))
    finally:
        handler.removeHandler(collector)
        logging.set_verbosity(verbosity)
    shape = "2 query heads, 1 KV heads, head_dim 80, page_size 16 on cpu"
    assert lines == [
        f"flashverify: grouped_fp32 runs for fp8_e4m3 cache, float16 query, {shape}",
        f"flashverify: scalar_fp32 runs for fp8_e4m3 cache, float16 query, {shape}",
        f"flashverify: grouped_fp32 runs for bfloat16 cache, float16 query, {shape}",
    ]
