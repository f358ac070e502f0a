"""Every feature of paged attention against the oracle, row by row.

Each test takes one axis of the argument space in full and leaves the others small;
sweep_test.py mixes them all at random.
"""

import dataclasses
import functools
import itertools

import pytest
import torch

import flashverify as fv
from tests.oracle import attention as oracle
from tests.support import backends, cases, tolerances

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_all_routes(
    case: cases.Case,
    backend: backends.Backend,
    expected: tolerances.Expected | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    what: str = "",
) -> None:
    expected = expected or tolerances.expected(case)
    for route in backends.routes_for(case, backend):
        result = backends.attend(case, backend, route=route, out_dtype=out_dtype)
        expected.check(
            result.out,
            result.lse,
            half_partials=route in backends.HALF_ROUTES,
            half_weights=backends.half_weights(backend, case.k_cache),
            what=f"{route} on {backend} {what}",
        )


@functools.cache
def _of_dtypes(kv_dtype: str, q_dtype: torch.dtype) -> tolerances.Expected:
    request = cases.random_request(1, q_len=3, seq_len=150, kv_dtype=kv_dtype, q_dtype=q_dtype)
    return tolerances.expected(cases.paged([request], page_size=48))


@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@backends.on_every_backend
def test_dtypes(
    kv_dtype: str, q_dtype: torch.dtype, out_dtype: torch.dtype, backend: backends.Backend
) -> None:
    expected = _of_dtypes(kv_dtype, q_dtype)
    check_all_routes(expected.case, backend, expected, out_dtype=out_dtype)


@functools.cache
def _of_head_dim(head_dim: int) -> tolerances.Expected:
    request = cases.random_request(
        head_dim, q_len=2, seq_len=140, q_heads=4, kv_heads=2, head_dim=head_dim
    )
    return tolerances.expected(cases.paged([request], page_size=33))


@pytest.mark.parametrize("head_dim", backends.GROUPED_HEAD_DIMS)
@backends.on_every_backend
def test_head_dims(head_dim: int, backend: backends.Backend) -> None:
    expected = _of_head_dim(head_dim)
    assert "grouped_fp32" in backends.routes_for(expected.case)
    check_all_routes(expected.case, backend, expected)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 17, 31, 33, 63, 65, 100, 160, 255, 257, 511])
@backends.on_every_backend
def test_odd_head_dims(head_dim: int, backend: backends.Backend) -> None:
    check_all_routes(_of_head_dim(head_dim).case, backend, _of_head_dim(head_dim))


@functools.cache
def _of_heads(q_heads: int, kv_heads: int) -> tolerances.Expected:
    requests = [
        cases.random_request(seed, q_len=q_len, seq_len=90, q_heads=q_heads, kv_heads=kv_heads)
        for seed, q_len in enumerate((1, 3))
    ]
    return tolerances.expected(cases.paged(requests))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(1, 1), (2, 1), (3, 1), (5, 5), (6, 2), (7, 1), (8, 8), (16, 2), (24, 4), (32, 8), (71, 1)],
)
@backends.on_every_backend
def test_groups(q_heads: int, kv_heads: int, backend: backends.Backend) -> None:
    expected = _of_heads(q_heads, kv_heads)
    check_all_routes(expected.case, backend, expected)


@functools.cache
def _of_q_len(q_len: int) -> tolerances.Expected:
    request = cases.random_request(q_len, q_len=q_len, seq_len=100, q_heads=6, kv_heads=2)
    return tolerances.expected(cases.paged([request], page_size=10))


@pytest.mark.parametrize("q_len", range(1, 65))
@backends.on_every_backend
def test_q_lens(q_len: int, backend: backends.Backend) -> None:
    expected = _of_q_len(q_len)
    check_all_routes(expected.case, backend, expected)


@functools.cache
def _of_window(causal: bool, window: int | None) -> tolerances.Expected:
    requests = [
        cases.random_request(seed, q_len=q_len, seq_len=seq_len, q_heads=2)
        for seed, (q_len, seq_len) in enumerate([(8, 300), (5, 5), (8, 3), (1, 64), (4, 0)])
    ]
    return tolerances.expected(cases.paged(requests, page_size=20, causal=causal, window=window))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 63, 64, 65, 100, 299, 300, 301, 2**40])
@backends.on_every_backend
def test_windows(causal: bool, window: int | None, backend: backends.Backend) -> None:
    expected = _of_window(causal, window)
    check_all_routes(expected.case, backend, expected)


@functools.cache
def _of_extras(
    softcap: float, sinks: bool, scales: str, scale: float | None
) -> tolerances.Expected:
    request = cases.random_request(4, q_len=4, seq_len=130, q_heads=6, kv_heads=2)
    options: dict[str, object] = {"softcap": softcap, "scale": scale}
    if sinks:
        options["sinks"] = torch.tensor([0.0, 3.0, -3.0, 10.0, -80.0, 1.0])
    if scales == "number":
        options |= {"k_dequant_scale": 0.3, "v_dequant_scale": 1.7}
    elif scales == "one":
        options |= {
            "k_dequant_scale": torch.tensor([0.3]),
            "v_dequant_scale": torch.tensor([1.7]),
        }
    elif scales == "per head":
        options |= {
            "k_dequant_scale": torch.tensor([0.3, 2.0]),
            "v_dequant_scale": torch.tensor([1.7, 0.01]),
        }
    return tolerances.expected(cases.paged([request], **options))


@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("scales", ["none", "number", "one", "per head"])
@pytest.mark.parametrize("scale", [None, 0.5, -0.25, 0.0])
@backends.on_every_backend
def test_extras(
    softcap: float, sinks: bool, scales: str, scale: float | None, backend: backends.Backend
) -> None:
    expected = _of_extras(softcap, sinks, scales, scale)
    check_all_routes(expected.case, backend, expected)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("kv_dtype", cases.CACHE_DTYPES)
@backends.on_every_backend
def test_layouts(layout: str, kv_dtype: str, backend: backends.Backend) -> None:
    requests = [
        cases.random_request(
            seed, q_len=3, seq_len=seq_len, q_heads=4, kv_heads=2, kv_dtype=kv_dtype
        )
        for seed, seq_len in enumerate((200, 1, 77))
    ]
    check_all_routes(cases.paged(requests, page_size=13, layout=layout), backend)


# The hybrid models' page sizes are in the list: none of them may starve or leave a route.
PAGE_SIZES = (1, 2, 3, 15, 16, 63, 64, 65, 128, 784, 1568, 1616, 1648, 1728, 3296, 3456, 65536)


@functools.cache
def _of_page_size(page_size: int) -> tolerances.Expected:
    lengths = {min(length, 4000) for length in (1, page_size - 1, page_size, page_size + 1, 150)}
    requests = [
        cases.random_request(length, q_len=2, seq_len=length, q_heads=2)
        for length in sorted(lengths)
    ]
    return tolerances.expected(cases.paged(requests, page_size=page_size))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@backends.on_every_backend
def test_page_sizes(page_size: int, backend: backends.Backend) -> None:
    expected = _of_page_size(page_size)
    check_all_routes(expected.case, backend, expected)


@pytest.mark.parametrize("q_len", [1, 8])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@backends.on_every_device
def test_no_page_size_leaves_the_grouped_route(
    page_size: int, q_len: int, backend: backends.Backend
) -> None:
    """Without a route named, one token included, whatever the model's page size is."""
    case = cases.paged([cases.random_request(6, q_len=q_len, seq_len=70)], page_size=page_size)
    fv.paged_attention(**backends.arguments(case, backend.device))
    assert str(fv.last_route()) == "grouped_fp32"


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same contents in rows and heads that are strided, poison between them."""
    rows, heads, dim = tensor.shape
    storage = cases.poisoned_storage(tensor.dtype, rows + 1, heads + 2, dim + 5)
    view = storage[1:, 1:-1, 5:]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("q_dtype", DTYPES)
@backends.on_every_backend
def test_strided_queries_and_tables(q_dtype: torch.dtype, backend: backends.Backend) -> None:
    requests = [
        cases.random_request(s, q_len=4, seq_len=70, q_heads=4, kv_heads=2, q_dtype=q_dtype)
        for s in range(3)
    ]
    case = cases.paged(requests)
    table = torch.full((3, 2 * case.page_table.shape[1]), -7, dtype=torch.int32)
    table[:, : case.page_table.shape[1]] = case.page_table
    strided = cases.Case(
        _spread(case.q),
        case.k_cache,
        case.v_cache,
        table[:, : case.page_table.shape[1]],
        case.seq_lens,
        case.query_start_loc,
    )
    assert not strided.q.is_contiguous() and not strided.page_table.is_contiguous()
    for route in backends.routes_for(case, backend):
        plain, spread = (backends.attend(c, backend, route=route) for c in (case, strided))
        backends.assert_same_bits(spread, plain, route)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 33])
@backends.on_every_device
def test_strided_output(out_dtype: torch.dtype, head_dim: int, backend: backends.Backend) -> None:
    """Rows and heads of the output may lie apart; what lies between them is not touched."""
    request = cases.random_request(4, q_len=3, seq_len=70, q_heads=4, head_dim=head_dim)
    case = cases.paged([request])
    route = "scalar_fp32"
    plain = backends.attend(case, backend, route=route, out_dtype=out_dtype)
    storage = cases.poisoned_storage(out_dtype, 4, 7, head_dim + 3).to(backend.device)
    out = storage[1:, 1:5, 3:]
    arguments = backends.arguments(case, backend.device)
    fv.paged_attention(**arguments, out=out, route=fv.Route(route))
    wanted = cases.poisoned_storage(out_dtype, 4, 7, head_dim + 3)
    wanted[1:, 1:5, 3:] = plain.out
    assert torch.equal(cases.bits(storage.cpu()), cases.bits(wanted))


@backends.on_every_backend
def test_equal_blocks_without_query_start_loc(backend: backends.Backend) -> None:
    requests = [cases.random_request(s, q_len=4, seq_len=50 + s) for s in range(3)]
    case = cases.paged(requests)
    without = dataclasses.replace(case, query_start_loc=None)
    backends.assert_same_bits(backends.attend(without, backend), backends.attend(case, backend))


@functools.cache
def _of_splits(causal: bool, window: int | None) -> tolerances.Expected:
    requests = [
        cases.random_request(seed, q_len=2, seq_len=seq_len, q_heads=2)
        for seed, seq_len in enumerate((5300, 1025, 2047, 3072))
    ]
    return tolerances.expected(cases.paged(requests, page_size=100, causal=causal, window=window))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1500), (False, 2500)])
@backends.on_every_backend
def test_several_splits(causal: bool, window: int | None, backend: backends.Backend) -> None:
    """Long enough for the merge tree to have several levels, not a power of two of splits."""
    expected = _of_splits(causal, window)
    check_all_routes(expected.case, backend, expected)


def test_out_of_a_call_without_lse_or_out_is_the_same() -> None:
    """The other forms of the call: a new output, no LSE, and the default route."""
    case = cases.paged([cases.random_request(5, seq_len=99)])
    want = backends.attend(case)
    out = fv.paged_attention(**backends.arguments(case))
    assert isinstance(out, torch.Tensor) and out.dtype == case.q.dtype
    assert torch.equal(cases.bits(out), cases.bits(want.out))


def test_visible_keys_of_the_contract() -> None:
    """The oracle's own visibility against the sentence in the contract."""
    for q_len, seq_len, window in itertools.product((1, 3), (0, 2, 5), (None, 1, 4)):
        for row in range(q_len):
            start, stop = oracle.visible_keys(row, q_len, seq_len, window=window)
            keys = [key for key in range(seq_len) if key <= seq_len - q_len + row]
            keys = keys[-window:] if window else keys
            assert list(range(start, stop)) == keys
