"""The mask function: what it takes for a length, and what it refuses."""

import pytest
import torch
from transformers import masking_utils

import flashverify as fv
from flashverify.integrations.transformers.mask import paged_mask


def flags(*rows):
    return torch.tensor([[character == "1" for character in row] for row in rows])


def test_causal_without_padding():
    mask = paged_mask(2, 3, 8, q_offset=5)
    assert (mask.q_tokens, mask.kv_tokens, mask.window, mask.left_padding) == (3, 8, None, None)
    assert paged_mask(2, 3, 8, q_offset=5, attention_mask=flags("1" * 8, "1" * 8)) == mask


def test_left_padding_is_a_count_for_each_row():
    mask = paged_mask(3, 4, 4, attention_mask=flags("0011", "1111", "0000"))
    assert mask.left_padding.tolist() == [2, 0, 4]
    assert mask.left_padding.dtype == torch.int32


def test_flags_beyond_this_pass_do_not_count():
    mask = paged_mask(1, 3, 3, attention_mask=flags("01100"))
    assert mask.left_padding.tolist() == [1]


@pytest.mark.parametrize("row", ["1100", "0110", "0101"])
def test_a_hole_is_refused(row):
    with pytest.raises(fv.UnsupportedError, match="row 1 hides a token to the right"):
        paged_mask(2, 4, 4, attention_mask=flags("1111", row))


def test_a_short_mask_is_refused():
    with pytest.raises(fv.UnsupportedError, match=r"shape \[1, 2\]; accepted: \[1, 4\]"):
        paged_mask(1, 4, 4, attention_mask=flags("11"))


def test_a_sliding_window_counts_the_row_itself():
    function = masking_utils.sliding_window_causal_mask_function(5)
    mask = paged_mask(1, 1, 9, q_offset=8, mask_function=function)
    assert mask.window == 5
    # The number that transformers' own mask shows of the nine.
    shown = masking_utils.sdpa_mask(
        1, 1, 9, q_offset=8, mask_function=function, allow_is_causal_skip=False
    )
    assert int(shown.sum()) == 5


OTHER_PATTERNS = {
    "bidirectional": masking_utils.bidirectional_mask_function,
    "bidirectional_window": masking_utils.sliding_window_bidirectional_mask_function(5),
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 9, dtype=torch.int64)),
    ),
    "window_or_causal": masking_utils.or_masks(
        masking_utils.sliding_window_overlay(5), masking_utils.causal_mask_function
    ),
    "window_alone": masking_utils.sliding_window_overlay(5),
    "lambda": lambda _batch, _head, _query, _key: True,
    "builtin": torch.ge,
}


@pytest.mark.parametrize("function", OTHER_PATTERNS.values(), ids=OTHER_PATTERNS)
def test_other_patterns_are_refused(function):
    with pytest.raises(fv.UnsupportedError, match=r"mask_function: .*; accepted: causal"):
        paged_mask(1, 1, 9, q_offset=8, mask_function=function)


def test_a_pattern_of_the_models_own_is_refused():
    with pytest.raises(fv.UnsupportedError, match="the model's own pattern"):
        paged_mask(1, 1, 9, q_offset=8, use_vmap=True)


def test_a_cache_that_dropped_tokens_is_refused():
    with pytest.raises(fv.UnsupportedError, match="holds tokens 4 to 5 for queries from 8"):
        paged_mask(1, 1, 5, q_offset=8, kv_offset=4)
