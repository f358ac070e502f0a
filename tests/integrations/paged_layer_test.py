"""The cache layer by itself: rollback, growth, batches."""

import pytest
import torch

import flashverify as fv
from flashverify.integrations.transformers import PagedLayer
from flashverify.integrations.transformers.mask import PagedMask

HEADS, DIM = 2, 64


def states(tokens, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, HEADS, tokens, DIM, generator=generator).to(torch.float16)


def run(layer, qkv, padding=None):
    """One pass; [batch, tokens, heads, head_dim]."""
    q, k, v = qkv
    layer.update(k, v)
    mask = PagedMask(q.shape[2], layer.get_seq_length(), None, padding)
    return layer.attend(q, mask, scale=None)


def pieces(qkv, *lengths):
    return qkv.split(list(lengths), dim=3)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_passes_give_what_one_pass_gives(page_size):
    whole = run(PagedLayer(page_size=page_size), states(100))
    layer = PagedLayer(page_size=page_size)
    parts = [run(layer, part) for part in pieces(states(100), 5, 1, 66, 8, 20)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert layer.get_seq_length() == 100 and layer.get_mask_sizes(8) == (108, 0)
    assert layer.get_max_length() == -1


@pytest.mark.parametrize("page_size", [3, 64])
def test_cropped_tokens_leave_no_trace(page_size):
    kept, wrong, right = pieces(states(40), 20, 10, 10)
    layer = PagedLayer(page_size=page_size)
    run(layer, kept)
    run(layer, wrong)
    layer.crop(-10)
    assert layer.get_seq_length() == 20
    found = run(layer, right)
    clean = PagedLayer(page_size=page_size)
    run(clean, kept)
    assert torch.equal(found, run(clean, right))


def test_crop_takes_what_there_is_and_no_more():
    layer = PagedLayer()
    run(layer, states(4))
    layer.crop(0)
    assert layer.get_seq_length() == 4
    for wrong in (-5, 1):
        message = f"tokens_to_remove: {wrong}; accepted: -4 to 0"
        with pytest.raises(fv.InvalidArgumentError, match=message):
            layer.crop(wrong)
    layer.crop(-4)
    assert layer.get_seq_length() == 0


def test_reset_forgets_all():
    layer = PagedLayer(page_size=4)
    run(layer, states(30), torch.tensor([3, 0], dtype=torch.int32))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert torch.equal(run(layer, states(9, seed=1)), run(PagedLayer(), states(9, seed=1)))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "float16"])
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([False, True])), [1]),
    ],
)
def test_sequences_move_whole(kv_cache_dtype, change, rows):
    first, _ = pieces(states(24), 17, 7)
    padding = torch.tensor([2, 5], dtype=torch.int32)
    layer = PagedLayer(kv_cache_dtype=kv_cache_dtype, page_size=4)
    run(layer, first, padding)
    change(layer)
    # Sequences that were copied from one must not share pages: each goes on by itself.
    later = states(7, batch=len(rows), seed=1)
    found = run(layer, later, padding[rows])
    for index, row in enumerate(rows):
        alone = PagedLayer(kv_cache_dtype=kv_cache_dtype, page_size=4)
        run(alone, first[:, row : row + 1], padding[row : row + 1])
        expected = run(alone, later[:, index : index + 1], padding[row : row + 1])
        assert torch.equal(found[index], expected[0])


def test_padding_rows_give_zero():
    out = run(PagedLayer(page_size=4), states(100), torch.tensor([70, 0], dtype=torch.int32))
    assert not bool(out[0, :70].any())
    assert bool(out[0, 70:].any(dim=2).all()) and bool(out[1].any(dim=2).all())


def test_misuse_is_refused():
    layer = PagedLayer()
    _, k, v = states(4)
    keys, _ = layer.update(k, v)
    with pytest.raises(fv.InvalidArgumentError, match="attention of the pass before"):
        layer.update(k, v)
    with pytest.raises(fv.InvalidArgumentError, match="3 tokens, and the cache holds 4"):
        layer.attend(k, PagedMask(3, 3, None, None), scale=None)
    # What is computed from the keys knows no cache any more.
    assert keys.layer is layer and (keys * 1).layer is None
    layer.reset()
    with pytest.raises(fv.InvalidArgumentError, match="holds 2 sequences, and the pass has 1"):
        layer.update(k[:1], v[:1])
    with pytest.raises(fv.UnsupportedError, match=r"value_states: shape"):
        PagedLayer().update(k, v[..., :32])
    with pytest.raises(fv.UnsupportedError, match="offloading"):
        layer.offload()


@pytest.mark.parametrize("page_size", [0, -1, 65537, 4.0, True, None])
def test_a_page_that_none_can_be_is_refused(page_size):
    with pytest.raises(fv.InvalidArgumentError, match=r"page_size: .*; accepted: 1 to 65536"):
        PagedLayer(page_size=page_size)
