"""The oracle is checked before it checks anything: by hand, by loops, and by torch."""

import itertools
import math

import pytest
import torch

from tests.oracle import attention, fp8, kv_cache, state
from tests.support import cases

FORMATS = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=lambda format: format.name)
TORCH_DTYPE = {format: dtype for dtype, format in fp8.BY_DTYPE.items()}


@pytest.mark.parametrize(
    ("format", "code", "value"),
    [
        (fp8.E4M3, 0x00, 0.0),
        (fp8.E4M3, 0x01, 2.0**-9),
        (fp8.E4M3, 0x07, 7 * 2.0**-9),
        (fp8.E4M3, 0x08, 2.0**-6),
        (fp8.E4M3, 0x38, 1.0),
        (fp8.E4M3, 0x39, 1.125),
        (fp8.E4M3, 0x7E, 448.0),
        (fp8.E4M3, 0xFE, -448.0),
        (fp8.E5M2, 0x01, 2.0**-16),
        (fp8.E5M2, 0x03, 3 * 2.0**-16),
        (fp8.E5M2, 0x04, 2.0**-14),
        (fp8.E5M2, 0x3C, 1.0),
        (fp8.E5M2, 0x7B, 57344.0),
        (fp8.E5M2, 0x7C, math.inf),
        (fp8.E5M2, 0xFC, -math.inf),
    ],
)
def test_landmarks(format: fp8.Format, code: int, value: float) -> None:
    assert format.value_of(code) == value


@FORMATS
def test_table(format: fp8.Format) -> None:
    finite = format.magnitudes
    assert len(finite) == {"fp8_e4m3": 127, "fp8_e5m2": 124}[format.name]
    assert (finite.diff() > 0).all(), "codes of one sign ascend"
    assert (
        format.nan_codes
        == {
            "fp8_e4m3": [0x7F, 0xFF],
            "fp8_e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF],
        }[format.name]
    )
    assert math.copysign(1.0, format.value_of(0x80)) == -1.0


@FORMATS
def test_decode_agrees_with_torch(format: fp8.Format) -> None:
    codes = torch.arange(256).to(torch.uint8)
    theirs = codes.view(TORCH_DTYPE[format]).to(torch.float64)
    torch.testing.assert_close(format.decode(codes), theirs, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_encode_inverts_decode(format: fp8.Format) -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = format.decode(codes)
    finite = torch.isfinite(values)
    assert torch.equal(format.encode(values)[finite], codes[finite])
    assert torch.isnan(format.decode(format.encode(values[torch.isnan(values)]))).all()


@FORMATS
def test_encode_agrees_with_torch_in_range(format: fp8.Format) -> None:
    """In range torch rounds as it should; beyond it, it overflows where the contract saturates."""
    every_half = torch.arange(65536).to(torch.uint16).view(torch.float16).to(torch.float32)
    noise = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    values = torch.cat([every_half, noise, noise * 2.0**-8, noise * 2.0**-15])
    values = values[values.abs() <= format.max_finite]
    theirs = values.to(TORCH_DTYPE[format]).view(torch.uint8)
    assert torch.equal(format.encode(values), theirs)


@pytest.mark.parametrize(
    ("format", "value", "code"),
    [
        (fp8.E4M3, 1 + 1 / 16, 0x38),  # a tie, to the even code
        (fp8.E4M3, 1 + 3 / 16, 0x3A),
        (fp8.E4M3, 2.0**-10, 0x00),  # half of the smallest subnormal
        (fp8.E4M3, -(2.0**-10), 0x80),
        (fp8.E4M3, 3 * 2.0**-10, 0x02),
        (fp8.E4M3, math.nextafter(2.0**-10, 1), 0x01),
        (fp8.E4M3, 7.5 * 2.0**-9, 0x08),  # subnormal to normal
        (fp8.E4M3, 464.0, 0x7E),
        (fp8.E4M3, 1e30, 0x7E),
        (fp8.E4M3, -math.inf, 0xFE),
        (fp8.E5M2, 1 + 1 / 8, 0x3C),
        (fp8.E5M2, 1 + 3 / 8, 0x3E),
        (fp8.E5M2, 2.0**-17, 0x00),
        (fp8.E5M2, 61440.0, 0x7B),
        (fp8.E5M2, math.inf, 0x7B),
        (fp8.E5M2, -1e30, 0xFB),
    ],
)
def test_encode_by_hand(format: fp8.Format, value: float, code: int) -> None:
    assert int(format.encode(torch.tensor([value], dtype=torch.float64))) == code


def test_encode_divides_in_fp32_before_rounding() -> None:
    values = torch.tensor([[[1.0625 * 3]], [[1.0]]])
    codes = kv_cache.encode(values, 3.0, torch.float8_e4m3fn)
    assert codes.flatten().tolist() == [0x38, 0x2B]  # a tie at 1.0625; 1/3 is nearest to 11/32


def _by_loops(case: cases.Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition again, one row and one key at a time in Python floats."""
    options = {"causal": True, "window": None, "softcap": 0.0, "sinks": None, **case.options}
    rows, q_heads, head_dim = case.q.shape
    page_size, kv_heads = case.k_cache.shape[1:3]
    k_scale = options.get("k_dequant_scale", torch.ones(kv_heads)).tolist()
    v_scale = options.get("v_dequant_scale", torch.ones(kv_heads)).tolist()
    k_cache = attention.decode(case.k_cache)
    v_cache = attention.decode(case.v_cache)
    out = torch.zeros((rows, q_heads, head_dim), dtype=torch.float64)
    lse = torch.full((rows, q_heads), -math.inf, dtype=torch.float64)
    starts = case.query_start_loc.tolist()
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        q_len = starts[request + 1] - starts[request]
        for row, head in itertools.product(range(q_len), range(q_heads)):
            kv_head = head * kv_heads // q_heads
            position = seq_len - q_len + row
            terms = []
            for token in range(seq_len):
                last = position if options["causal"] else seq_len - 1
                if token > last or (options["window"] and token <= last - options["window"]):
                    continue
                page = int(case.page_table[request, token // page_size])
                key = k_cache[page, token % page_size, kv_head]
                query = case.q[starts[request] + row, head].to(torch.float64)
                score = float(query @ key) * options["scale"] * k_scale[kv_head]
                if options["softcap"]:
                    score = options["softcap"] * math.tanh(score / options["softcap"])
                terms.append((score, v_cache[page, token % page_size, kv_head]))
            if not terms:
                continue
            total = sum(math.exp(score) for score, _ in terms)
            if options["sinks"] is not None:
                total += math.exp(float(options["sinks"][head]))
            for score, value in terms:
                out[starts[request] + row, head] += math.exp(score) / total * value
            out[starts[request] + row, head] *= v_scale[kv_head]
            lse[starts[request] + row, head] = math.log(total)
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("extras", [False, True])
def test_attention_by_loops(
    causal: bool, window: int | None, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}
    requests = [
        cases.random_request(1, q_len=3, seq_len=11, **shape),
        cases.random_request(2, q_len=0, seq_len=5, **shape),
        cases.random_request(3, q_len=4, seq_len=2, **shape),  # its first two rows see nothing
        cases.random_request(4, q_len=2, seq_len=0, **shape),
    ]
    options: dict[str, object] = {"scale": 0.5}
    if extras:
        options |= {
            "softcap": 1.5,
            "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
            "k_dequant_scale": torch.tensor([0.5, 2.0]),
            "v_dequant_scale": torch.tensor([3.0, 0.25]),
        }
    case = cases.paged(requests, page_size=4, causal=causal, window=window, **options)
    out, lse = _by_loops(case)
    monkeypatch.setattr(attention, "_BLOCK_TOKENS", 5)  # blocks must not show
    answer = case.expected(with_bounds=True)
    torch.testing.assert_close(answer.out, out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(answer.lse, lse, rtol=1e-12, atol=1e-14)
    assert answer.out_magnitude is not None and answer.score_magnitude is not None
    assert (answer.out_magnitude >= answer.out.abs() * (1 - 1e-12)).all()
    assert (answer.score_magnitude >= 0).all() and (answer.score_magnitude > 0).any()


def test_attention_agrees_with_torch() -> None:
    request = cases.random_request(5, q_len=8, seq_len=300, q_heads=8, kv_heads=2)
    answer = cases.paged([request], page_size=32).expected()
    q = request.q.to(torch.float64).transpose(0, 1)
    k, v = (attention.decode(x).transpose(0, 1) for x in (request.k, request.v))
    mask = torch.ones(8, 300, dtype=torch.bool).tril(300 - 8)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(answer.out, theirs[0].transpose(0, 1), rtol=1e-12, atol=1e-14)


def test_nan_reaches_the_rows_that_see_it_and_no_other() -> None:
    request = cases.random_request(6, q_len=4, seq_len=9, q_heads=2, head_dim=8)
    k, v = request.k.view(torch.uint8).clone(), request.v.view(torch.uint8).clone()
    k[7, 0, 3] = 0x7F  # seen by rows 2 and 3
    v[6, 0, 5] = 0xFF  # seen by rows 1, 2 and 3
    dtype = torch.float8_e4m3fn
    answer = cases.paged([cases.Request(request.q, k.view(dtype), v.view(dtype))]).expected()
    assert torch.isnan(answer.lse).all(1).tolist() == [False, False, True, True]
    nan = torch.isnan(answer.out)
    assert not nan[0].any() and nan[2:].all()
    assert nan[1, :, 5].all() and nan[1].sum() == 2


def test_fp32_reference_is_near_but_not_equal() -> None:
    case = cases.paged([cases.random_request(7, seq_len=500)])
    exact, plain = case.expected().out, case.expected(dtype=torch.float32).out
    error = (plain - exact).norm() / exact.norm()
    assert 1e-9 < error < 2e-6


def test_merge_of_shards_is_the_whole() -> None:
    request = cases.random_request(8, q_len=1, seq_len=40)
    whole = cases.paged([request]).expected()
    shards = []
    for first, last in ((0, 13), (13, 13), (13, 40)):
        shard = cases.Request(request.q, request.k[first:last], request.v[first:last])
        shards.append(cases.paged([shard]).expected())
    out, lse = state.merge(
        torch.stack([shard.out for shard in shards]), torch.stack([shard.lse for shard in shards])
    )
    torch.testing.assert_close(out, whole.out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, whole.lse, rtol=1e-12, atol=1e-14)


def test_merge_of_nothing_is_nothing() -> None:
    outs = torch.full((2, 1, 1, 3), math.nan)
    out, lse = state.merge(outs, torch.full((2, 1, 1), -math.inf))
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_placement_does_not_change_the_answer() -> None:
    """The cases module itself: every layout and page size holds the same contents."""
    request = cases.random_request(9, seq_len=70, q_heads=4, kv_heads=2, head_dim=16)
    want = cases.paged([request], page_size=70).expected()
    for layout, page_size in itertools.product(cases.LAYOUTS, (1, 7, 64, 200)):
        case = cases.paged([request], page_size=page_size, layout=layout, seed=page_size)
        assert torch.equal(case.expected().out, want.out), (layout, page_size)


def test_cases_poison_what_must_not_matter() -> None:
    case = cases.paged([cases.random_request(10, seq_len=5)], page_size=4)
    codes = case.k_cache.view(torch.uint8)
    used = case.page_table[0, :2].tolist()
    assert (codes[used[1], 1:] == 0xFF).all(), "the rest of the last page"
    unused = [page for page in range(4) if page not in used]
    assert (codes[unused] == 0xFF).all(), "pages that no request holds"
    assert not ((case.page_table[0, 2:] >= 0) & (case.page_table[0, 2:] < 4)).any()
