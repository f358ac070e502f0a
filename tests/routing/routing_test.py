"""The route planner against rules written down a second time, as predicates.

Nothing here reads the planner's own table, except the one test of its form.
"""

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashverify import routing
from flashverify.dtypes import KVCacheDtype
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.routing import Route, RoutePlan, RouteRequest, SpeculativeMethod, plan_route

DEVICES: list[tuple[str, tuple[int, int] | None]] = [
    ("cpu", None),
    ("cuda", (6, 1)),
    ("cuda", (7, 0)),
    ("cuda", (9, 0)),
    ("cuda", (12, 0)),
]
CACHES: list[KVCacheDtype] = ["fp8_e4m3", "fp8_e5m2", "float16", "bfloat16"]
Q_LENS = [-1, 0, 1, 2, 7, 8, 31, 32, 33, 63, 64, 65]
HEAD_DIMS = [0, 1, 63, 64, 72, 80, 96, 112, 128, 129, 192, 256, 384, 511, 512, 513]
PAGE_SIZES = [784, 1568, 1616, 1648, 1728, 3296, 3456, 1, 16, 17, 65536]
ROUTES: list[Route | None] = [None, *Route]

# What cycles beside the product: mostly valid, and each invalid value in turn.
GROUPS = [1, 6, 3, 8, 32, 64, 7, 6, 1, 0, 5, 16, 2]
ALL_PAGE_SIZES = [*PAGE_SIZES, 0, *PAGE_SIZES, 65537]
Q_DTYPES = ["float16", "bfloat16", "float32", "float16", "float64"]
REVISIONS = [4] * 9 + [3] + [4] * 9 + [5]


def requests() -> Iterator[RouteRequest]:
    cycles = zip(
        itertools.cycle(GROUPS),
        itertools.cycle(ALL_PAGE_SIZES),
        itertools.cycle(Q_DTYPES),
        itertools.cycle(REVISIONS),
        strict=False,
    )
    product = itertools.product(
        DEVICES, CACHES, Q_LENS, HEAD_DIMS, (True, False), SpeculativeMethod, ROUTES
    )
    for (device, cache, q_len, head_dim, causal, method, route), cycle in zip(
        product, cycles, strict=False
    ):
        group, page_size, q_dtype, revision = cycle
        yield RouteRequest(
            device_type=device[0],
            capability=device[1],
            kv_cache_dtype=cache,
            q_dtype=q_dtype,
            q_len=q_len,
            head_dim=head_dim,
            group=group,
            page_size=page_size,
            causal=causal,
            speculative_method=method,
            route=route,
            precision_revision=revision,
        )


# The rules, one predicate each.


def is_dflash2(r: RouteRequest) -> bool:
    return r.speculative_method.value.startswith("dflash2")


def is_half(route: Route | None) -> bool:
    return route is not None and route.value.endswith("_half")


def well_formed(r: RouteRequest) -> bool:
    return (
        (r.capability is None or r.capability[0] >= 7)
        and r.group > 0
        and 0 < r.page_size <= 1 << 16
        and r.q_dtype in {"float16", "bfloat16", "float32"}
        and r.precision_revision == 4
    )


def causality_agrees(r: RouteRequest) -> bool:
    if r.speculative_method.value == "dflash2_target":
        return r.causal
    if r.speculative_method.value == "dflash2_draft":
        return not r.causal
    return True


def bfloat16_tensor_cores(r: RouteRequest) -> bool:
    return r.q_dtype == "bfloat16" and r.capability is not None and r.capability[0] >= 8


def kernel_fits(r: RouteRequest, route: Route) -> bool:
    if route.value.startswith("scalar"):
        return 1 <= r.head_dim <= 512 and 0 <= r.q_len <= 64
    if r.head_dim not in {64, 80, 96, 112, 128, 192, 256, 512}:
        return False
    if r.device_type == "cuda" and (r.head_dim == 512 or r.q_dtype == "float32"):
        return False
    if r.device_type == "cuda" and r.kv_cache_dtype == "bfloat16" and not bfloat16_tensor_cores(r):
        return False
    if r.capability == (12, 0) and r.kv_cache_dtype == "bfloat16" and r.head_dim > 128:
        return False
    if route.value == "xqa_half":
        return 0 <= r.q_len <= 1
    return 0 <= r.q_len <= 64


def may_name(r: RouteRequest) -> bool:
    """E5M2 was asked for in so many words; all other DFlash2 work keeps FP32 state."""
    return not (is_half(r.route) and is_dflash2(r) and r.kv_cache_dtype != "fp8_e5m2")


def expected_route(r: RouteRequest) -> Route | None:
    """The route, or None for a refusal."""
    if not (well_formed(r) and causality_agrees(r) and may_name(r)):
        return None
    if r.route is not None:
        return r.route if kernel_fits(r, r.route) else None
    if kernel_fits(r, Route.grouped_fp32):
        return Route.grouped_fp32
    if kernel_fits(r, Route.scalar_fp32):
        return Route.scalar_fp32
    return None


def plan_or_error(r: RouteRequest) -> RoutePlan | UnsupportedError:
    try:
        return plan_route(r)
    except UnsupportedError as error:
        return error


def test_every_request_of_the_product_against_the_rules() -> None:
    outcomes: Counter[Route | None] = Counter()
    for r in requests():
        result = plan_or_error(r)
        found = result.route if isinstance(result, RoutePlan) else None
        assert found == expected_route(r), (r, result)
        outcomes[found] += 1
        if isinstance(result, RoutePlan):
            assert all(result.reasons), r
            assert str(result.route) in result.reasons[-1], r
            # The two promises of the contract, once more and by themselves.
            if is_dflash2(r) and r.kv_cache_dtype == "fp8_e4m3":
                assert not is_half(found), r
            if is_half(found):
                assert found is r.route, r
    # The product reaches every outcome often enough to mean something.
    assert outcomes.total() > 200_000
    assert min(outcomes[route] for route in ROUTES) > 400, outcomes


ADVICE = re.compile(r"(\w+): [^;]*; accepted: [^;]*; nearest supported value: ([^;]+)")


def follow_advice(r: RouteRequest, message: str) -> RouteRequest:
    changes: dict[str, Any] = {}
    for name, value in ADVICE.findall(message):
        if name == "capability":
            changes[name] = tuple(int(part) for part in value.split("."))
        elif name == "q_dtype":
            changes[name] = value
        elif name == "route":
            changes[name] = Route(value)
        else:
            changes[name] = value == "True" if name == "causal" else int(value)
    return dataclasses.replace(r, **changes)


def test_the_nearest_supported_value_is_supported() -> None:
    """Every refusal's advice, followed to its end, leads to a plan."""
    followed = 0
    for r in itertools.islice(requests(), 0, None, 7):
        if r.q_dtype == "float64":
            continue  # a name has no nearest
        original = r
        for _ in range(8):
            result = plan_or_error(r)
            if isinstance(result, RoutePlan):
                break
            advised = follow_advice(r, str(result))
            assert advised != r, (original, str(result))
            r = advised
            followed += 1
        else:
            pytest.fail(f"the advice goes in circles from {original}: {result}")
    assert followed > 10_000


def test_each_combination_meets_one_row_of_the_policy() -> None:
    for method, cache, route in itertools.product(SpeculativeMethod, CACHES, ROUTES):
        r = RouteRequest("cpu", cache, 8, 256, 6, 3296, speculative_method=method, route=route)
        assert sum(row.applies(r) for row in routing._POLICY) == 1, r


def plan(**changes: Any) -> RoutePlan:
    fields: dict[str, Any] = {
        "device_type": "cpu",
        "kv_cache_dtype": "fp8_e4m3",
        "q_len": 8,
        "head_dim": 256,
        "group": 6,
        "page_size": 3296,
    }
    if changes.get("device_type") == "cuda":
        fields["capability"] = (7, 0)
    return plan_route(**(fields | changes))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_any_page_size_reaches_the_grouped_kernel(device_type: str, page_size: int) -> None:
    for q_len in range(33):
        found = plan(
            device_type=device_type,
            page_size=page_size,
            q_len=q_len,
            speculative_method="dflash2_target",
        )
        assert found.route is Route.grouped_fp32


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_a_verified_token_decoded_alone_takes_the_same_route(capability: tuple[int, int]) -> None:
    target = {
        "device_type": "cuda",
        "capability": capability,
        "speculative_method": "dflash2_target",
    }
    assert plan(q_len=1, **target) == dataclasses.replace(
        plan(q_len=8, **target), reasons=plan(q_len=1, **target).reasons
    )
    with pytest.raises(UnsupportedError, match="contradicts the DFlash2 configuration"):
        plan(q_len=1, route="xqa_half", **target)


def test_fp8_is_e4m3_on_sm70() -> None:
    target = {"device_type": "cuda", "capability": (7, 0), "speculative_method": "dflash2_target"}
    assert plan(kv_cache_dtype="fp8", **target) == plan(kv_cache_dtype="fp8_e4m3", **target)
    with pytest.raises(UnsupportedError):
        plan(kv_cache_dtype="fp8", route="grouped_half", **target)


def test_explicit_e5m2_and_other_work_keep_their_named_routes() -> None:
    assert plan(q_len=1, route="xqa_half").route is Route.xqa_half
    assert plan(q_len=1, route="xqa_half", speculative_method="mtp").route is Route.xqa_half
    for route in ("grouped_half", "scalar_half"):
        for method in SpeculativeMethod:
            found = plan(
                kv_cache_dtype="fp8_e5m2",
                route=route,
                speculative_method=method,
                causal=method is not SpeculativeMethod.dflash2_draft,
            )
            assert found.route is Route(route)


def test_a_misfit_says_why_the_next_kernel_is_taken() -> None:
    found = plan(head_dim=72)
    assert found.route is Route.scalar_fp32
    assert "head_dim: 72 with grouped_fp32 on cpu" in found.reasons[1]
    assert str(found).startswith("scalar_fp32: ")


@pytest.mark.parametrize(
    ("capability", "q_dtype", "route"),
    [
        ((7, 0), "bfloat16", "scalar_fp32"),
        ((7, 5), "bfloat16", "scalar_fp32"),
        ((8, 0), "bfloat16", "grouped_fp32"),
        ((8, 6), "bfloat16", "scalar_fp32"),
        ((8, 0), "float16", "scalar_fp32"),
        ((9, 0), "float32", "scalar_fp32"),
    ],
)
def test_a_bfloat16_cache_meets_tensor_cores_that_hold_its_range(
    capability: tuple[int, int], q_dtype: str, route: str
) -> None:
    device: dict[str, Any] = {"device_type": "cuda", "capability": capability}
    assert plan(kv_cache_dtype="bfloat16", q_dtype=q_dtype, **device).route == route
    # FP8 is exact in either operand type, and the CPU computes in FP32.
    exact = Route.scalar_fp32 if q_dtype == "float32" else Route.grouped_fp32
    assert plan(kv_cache_dtype="fp8", q_dtype=q_dtype, **device).route is exact
    assert plan(kv_cache_dtype="bfloat16", q_dtype=q_dtype).route is Route.grouped_fp32


def test_a_named_kernel_is_never_replaced() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(head_dim=72, route="grouped_fp32")
    assert "nearest supported value: 80" in str(caught.value)
    assert "with no route named, scalar_fp32 computes it" in str(caught.value)


def test_both_misfits_are_named() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(head_dim=600, q_len=70)
    message = str(caught.value)
    assert (
        "head_dim: 600 with scalar_fp32 on cpu; accepted: 1..512; nearest supported value: 512"
        in message
    )
    assert (
        "q_len: 70 with scalar_fp32 on cpu; accepted: 0..64; nearest supported value: 64" in message
    )


def test_auto_follows_the_query() -> None:
    assert plan(kv_cache_dtype="auto", q_dtype=torch.bfloat16) == plan(
        kv_cache_dtype=torch.bfloat16, q_dtype="bfloat16"
    )
    with pytest.raises(UnsupportedError, match="float32"):
        plan(kv_cache_dtype="auto", q_dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"route": "grouped"}, "route: 'grouped'; accepted: grouped_fp32, scalar_fp32"),
        ({"speculative_method": "dflash"}, "speculative_method: 'dflash'; accepted: none, ngram"),
        ({"q_len": 8.0}, r"q_len: 8\.0; accepted: int"),
        ({"q_len": True}, "q_len: True; accepted: int"),
        ({"causal": 1}, "causal: 1; accepted: bool"),
        ({"page_size": "16"}, "page_size: '16'; accepted: int"),
        ({"head_dim": None}, "head_dim: None; accepted: int"),
        ({"precision_revision": "4"}, "precision_revision: '4'; acc"),
        ({"capability": (7, 0)}, r"capability: \(7, 0\) with device_type 'cpu'"),
        ({"device_type": "cuda", "capability": None}, "capability: None with device_type 'cuda'"),
        ({"device_type": "cuda", "capability": "7.0"}, r"capability: '7\.0'"),
        ({"device_type": "cuda", "capability": (7, 0.0)}, r"capability: \(7, 0\.0\)"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype: 8 is neither"),
    ],
)
def test_wrong_names_and_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_type": "mps"}, "device_type: 'mps'; accepted: cpu, cuda"),
        (
            {"device_type": "cuda", "capability": (6, 1)},
            r"capability: 6\.1 on cuda; accepted: 7\.0 and newer",
        ),
        ({"kv_cache_dtype": "int8"}, "integer caches"),
        ({"q_dtype": torch.float64}, "q_dtype: 'float64'; accepted: float32, float16, bfloat16"),
        ({"group": 0}, r"group: 0; .* nearest supported value: 1"),
        ({"page_size": 65537}, r"page_size: 65537; .* nearest supported value: 65536"),
        ({"precision_revision": 3}, r"precision_revision: 3; .* nearest supported value: 4"),
        (
            {"speculative_method": "dflash2_target", "causal": False},
            "causal: False with speculative_method dflash2_target; accepted: True",
        ),
        (
            {"speculative_method": "dflash2_draft", "causal": True},
            "causal: True with speculative_method dflash2_draft; accepted: False",
        ),
    ],
)
def test_refusals_name_argument_value_and_what_is_accepted(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan(**changes)


def test_an_unresolved_dtype_in_a_request_is_refused() -> None:
    request = RouteRequest("cpu", "fp8", 8, 256, 6, 3296)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="once resolved: fp8_e4m3"):
        plan_route(request)


def test_a_request_and_fields_are_not_mixed() -> None:
    request = RouteRequest("cpu", "fp8_e4m3", 8, 256, 6, 3296)
    with pytest.raises(InvalidArgumentError, match="q_len: given beside a RouteRequest"):
        plan_route(request, q_len=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="pagesize"):
        plan(pagesize=16)
    with pytest.raises(InvalidArgumentError, match="request: 8; accepted: a RouteRequest"):
        plan_route(8)  # type: ignore[call-overload]


def test_the_plan_depends_on_nothing_but_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RouteRequest("cpu", "fp8_e4m3", 8, 256, 6, 3296)
    before = plan_route(request)
    routing._plan.cache_clear()

    def no_environment(*_: object, **__: object) -> None:
        pytest.fail("the planner read the environment")

    monkeypatch.setattr(os, "getenv", no_environment)
    monkeypatch.setattr(torch.cuda, "get_device_capability", no_environment)
    monkeypatch.setattr(os.environ, "get", no_environment, raising=False)
    assert plan_route(request) == before


def test_routes_are_strings() -> None:
    assert Route.grouped_fp32 == "grouped_fp32"
    assert f"{Route.xqa_half}" == str(Route.xqa_half) == "xqa_half"
    assert [route.keeps_fp32_state for route in Route] == [True, True, False, False, False]
    assert str(SpeculativeMethod.dflash2_target) == "dflash2_target"
