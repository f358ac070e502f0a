import pytest
import torch

import flashverify as fv
from flashverify.integrations.vllm.context_parallel import local_lengths


def tokens_of(rank, ranks, interleave, length):
    return [t for t in range(length) if t // interleave % ranks == rank]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 4])
def test_lengths_count_the_tokens_of_a_rank(ranks, interleave):
    lengths = torch.arange(40, dtype=torch.int32)
    for rank in range(ranks):
        found = local_lengths(lengths, rank=rank, ranks=ranks, interleave=interleave)
        expected = [len(tokens_of(rank, ranks, interleave, n)) for n in range(40)]
        assert found.tolist() == expected
        assert found.dtype == torch.int32


def test_merged_ranks_give_what_one_rank_gives():
    """Rows of a verification block, each over its prefix of every rank's keys."""
    torch.manual_seed(0)
    ranks, interleave, length, rows, heads, dim = 2, 4, 53, 8, 6, 64
    q = torch.randn(rows, heads, dim, dtype=torch.float16)
    key, value = torch.randn(2, length, 1, dim, dtype=torch.float16)
    seen = torch.arange(length - rows + 1, length + 1, dtype=torch.int32)

    def attend(tokens, lengths):
        pages = torch.zeros(2, 1, 64, 1, dim, dtype=torch.uint8)
        k_cache, v_cache = pages
        slots = torch.arange(len(tokens))
        fv.append_kv(key[tokens], value[tokens], k_cache, v_cache, slots, kv_dtype="fp8_e4m3")
        table = torch.zeros(rows, 1, dtype=torch.int32)
        out = torch.empty(rows, heads, dim)
        return fv.paged_attention(
            q, k_cache, v_cache, table, lengths, kv_dtype="fp8_e4m3", out=out, return_lse=True
        )

    whole, whole_lse = attend(list(range(length)), seen)
    parts = [
        attend(
            tokens_of(rank, ranks, interleave, length),
            local_lengths(seen, rank=rank, ranks=ranks, interleave=interleave),
        )
        for rank in range(ranks)
    ]
    outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
    merged, lse = fv.merge_states(outs, lses)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(parts[0][0], whole, rtol=1e-3, atol=1e-3)
