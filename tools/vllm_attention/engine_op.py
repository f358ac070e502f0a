"""vLLM's own attention on the CPU: its cache write, and its pass. Imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    VERSION: str
    ops: Any

    def _get_attn_isa(
        dtype: torch.dtype, block_size: int, head_size: int, kv_cache_dtype: str
    ) -> str: ...
else:
    import vllm
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    VERSION = vllm.__version__

KV_DTYPE = "fp8_e4m3"
# What any rounding of a write keeps: the normal numbers, neither NaN nor zero.
_NORMAL_CODES = [code for code in range(256) if 0x08 <= code & 0x7F <= 0x7E]


class EngineAttention:
    """One layer's cache and pass, called as vLLM's CPU backend calls them.

    Attributes:
      isa: The variant of the op that the backend chooses for this shape.
      cache: uint8 [pages, kv_heads, page_size, 2 * head_dim], zeros at first; what lies
        where within a page is the op's own affair.
    """

    def __init__(
        self, *, pages: int, page_size: int, q_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        self.isa = _get_attn_isa(torch.bfloat16, page_size, head_dim, KV_DTYPE)
        self.cache = torch.zeros(pages, kv_heads, page_size, 2 * head_dim, dtype=torch.uint8)
        self._q_heads, self._kv_heads, self._head_dim = q_heads, kv_heads, head_dim

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and the value cache, as the backend passes them."""
        pages, kv_heads, page_size, _ = self.cache.shape
        key_cache, value_cache = self.cache.view(pages, kv_heads, 2 * page_size, -1).chunk(2, dim=2)
        return key_cache, value_cache

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, scale: float = 1.0
    ) -> None:
        """Writes bfloat16 [tokens, kv_heads, head_dim] to int64 [tokens] slots."""
        key_cache, value_cache = self.halves()
        ops.cpu_attn_reshape_and_cache(
            key,
            value,
            key_cache,
            value_cache,
            slots,
            self.isa,
            k_scale=scale,
            v_scale=scale,
            kv_cache_dtype=KV_DTYPE,
        )

    def plan(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """What the backend prepares once a step, for all layers."""
        plan: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=self._q_heads,
            num_kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            seq_lens=seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
            kv_cache_dtype=KV_DTYPE,
        )
        return plan

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        *,
        plan: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        softmax_scale: float,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """One pass of q, bfloat16 [rows, q_heads, head_dim], into out, the same."""
        key_cache, value_cache = self.halves()
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=softmax_scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=page_table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=KV_DTYPE,
        )


class EngineCodes:
    """The codes that vLLM's cache write gives, in the order of the elements written.

    Its pages have an order of their own. It is found by writing numbers that E4M3 holds
    exactly, two digits of each element's index, and looking where they went.
    """

    def __init__(self, *, page_size: int, kv_heads: int, head_dim: int) -> None:
        self._shape = (page_size, kv_heads, head_dim)
        self._attention = EngineAttention(
            pages=1, page_size=page_size, q_heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim
        )
        count = page_size * kv_heads * head_dim
        index = torch.arange(count)
        base = len(_NORMAL_CODES)
        codes = torch.tensor(_NORMAL_CODES, dtype=torch.uint8)
        low, high = codes[index % base], codes[index // base % base]
        rank = torch.zeros(256, dtype=torch.int64)
        rank[codes.long()] = torch.arange(base)
        k_low, v_high = self._written(low, high)
        k_high, v_low = self._written(high, low)
        k_index = rank[k_low.long()] + base * rank[k_high.long()]
        v_index = rank[v_low.long()] + base * rank[v_high.long()]
        self._order = [torch.argsort(k_index), torch.argsort(v_index)]
        for found in (k_index, v_index):
            if not torch.equal(found.sort().values, index):
                raise RuntimeError("vLLM's cache write does not keep every element")

    def _written(
        self, k_codes: torch.Tensor, v_codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (
            codes.view(torch.float8_e4m3fn).to(torch.bfloat16).view(self._shape)
            for codes in (k_codes, v_codes)
        )
        return self._raw(key, value)

    def _raw(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._attention.cache.zero_()
        self._attention.write(key, value, torch.arange(len(key)))
        keys, values = self._attention.halves()
        return keys.flatten(), values.flatten()

    def __call__(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of bfloat16 [tokens, kv_heads, head_dim], uint8 of the same shape each."""
        page_size = self._shape[0]
        k_out = torch.empty(key.shape, dtype=torch.uint8)
        v_out = torch.empty(value.shape, dtype=torch.uint8)
        for start in range(0, len(key), page_size):
            stop = min(start + page_size, len(key))
            raw = self._raw(key[start:stop].contiguous(), value[start:stop].contiguous())
            for out, found, order in zip((k_out, v_out), raw, self._order, strict=True):
                out[start:stop] = found[order].view(self._shape)[: stop - start]
        return k_out, v_out
