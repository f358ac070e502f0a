import pytest
import torch

from flashverify.abba import cache_file, workload
from flashverify.abba.case import CHUNK_TOKENS, Case
from tests.abba import support

SMALL = Case(context=100, q_len=3, q_heads=4, kv_heads=2, head_dim=64, page_size=48, batch=2)


def bits(tensor):
    return workload.as_integers(tensor)


def test_shapes_and_the_same_bytes_for_the_same_seed():
    made = workload.make(SMALL, 7, None)
    assert made.q.shape == (6, 4, 64) and made.q.dtype == torch.float16
    assert made.k_cache.shape == made.v_cache.shape == (6, 48, 2, 64)
    assert made.seq_lens.tolist() == [100, 100]
    assert made.sha256() == workload.make(SMALL, 7, None).sha256()
    assert made.sha256()["k_cache"] != made.sha256()["v_cache"]
    for name, digest in workload.make(SMALL, 8, None).sha256().items():
        assert (digest == made.sha256()[name]) == name.endswith("scale")


def test_every_page_is_used_once_and_out_of_order():
    case = Case(context=1000, page_size=16, head_dim=64, batch=2)
    table = workload.make(case, 0, None).page_table
    assert sorted(table.flatten().tolist()) == list(range(126))
    assert table.flatten().tolist() != list(range(126))


@pytest.mark.parametrize("kv_dtype", cache_file.KV_DTYPES)
def test_slots_past_the_end_are_nan_and_no_other(kv_dtype):
    case = Case(context=100, kv_heads=2, head_dim=64, page_size=48, batch=2, kv_dtype=kv_dtype)
    made = workload.make(case, 0, None)
    for cache in (made.k_cache, made.v_cache):
        nan = torch.isnan(cache.float()).view(6 * 48, -1)
        used = torch.cat([made.slots(0, 0, 100), made.slots(1, 0, 100)])
        assert len(used.unique()) == 200
        assert not nan[used].any()
        assert nan.all(dim=1).sum() == 6 * 48 - 200


@pytest.mark.parametrize("kv_dtype", cache_file.KV_DTYPES)
def test_scaled_values_are_standard_normal(kv_dtype):
    case = Case(context=CHUNK_TOKENS + 1000, head_dim=64, page_size=3296, kv_dtype=kv_dtype)
    made = workload.make(case, 0, None)
    for cache, scale in (
        (made.k_cache, made.k_dequant_scale),
        (made.v_cache, made.v_dequant_scale),
    ):
        values = made.read(cache, 0, 0, case.context, 0) * scale
        assert float(values.mean()) == pytest.approx(0, abs=0.01)
        assert float(values.std()) == pytest.approx(1, abs=0.02)
        # The second chunk is not the first again.
        assert not torch.equal(values[:1000], values[CHUNK_TOKENS:])


def test_a_cache_file_reaches_the_pages_byte_for_byte():
    contents = cache_file.read(support.DATA / "smollm2_layer12_e4m3.safetensors")
    for page_size in (1, 16, 3296):
        made = workload.make(contents.case(page_size), 0, contents)
        slots = made.slots(0, 0, len(contents.k))
        for cache, stored in ((made.k_cache, contents.k), (made.v_cache, contents.v)):
            assert torch.equal(bits(cache).view(-1, 3, 64)[slots], bits(stored))
        assert torch.equal(made.q, contents.q)
        assert made.softmax_scale == 0.125
        assert contents.sha256 in made.source


def test_the_softmax_scale_is_an_fp32_number():
    made = workload.make(Case(context=4, head_dim=80, page_size=16), 0, None)
    assert made.softmax_scale == float(torch.tensor(80**-0.5))
    assert made.softmax_scale != 80**-0.5


def test_bits_are_compared_where_values_cannot_be():
    nan = torch.tensor([float("nan"), 0.0], dtype=torch.float16)
    assert workload.same_bits(nan, nan.clone())
    assert not workload.same_bits(nan, torch.tensor([float("nan"), -0.0], dtype=torch.float16))


def test_the_digest_is_of_the_bytes_in_row_major_order():
    import hashlib

    wide = torch.arange(6, dtype=torch.float16).view(2, 3)
    expected = hashlib.sha256(wide.numpy().tobytes()).hexdigest()
    assert workload.tensor_sha256(wide) == expected
    assert workload.tensor_sha256(wide.T.contiguous().T) == expected
