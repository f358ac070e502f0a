"""A layer of a transformers cache: pages of quantised keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers.cache_utils import CacheLayerMixin

from flashverify._arguments import refuse
from flashverify.attention import paged_attention
from flashverify.dtypes import KVScales, resolve_kv_cache_dtype, torch_dtype
from flashverify.errors import InvalidArgumentError, UnsupportedError
from flashverify.integrations.transformers.mask import PagedMask
from flashverify.kv_cache import append_kv
from flashverify.routing import KERNEL_LIMITS, PAGE_SIZES, Route, plan_route


def check_page_size(page_size: object) -> None:
    """Refuses what is no number of tokens that a page can have; raises InvalidArgumentError."""
    is_int = isinstance(page_size, int) and not isinstance(page_size, bool)
    if not is_int or page_size not in PAGE_SIZES:
        refuse("page_size", f"{page_size!r:.80}", f"{PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")


class LayerKeys(torch.Tensor):
    """Keys of one pass, which know the cache layer that they are to be stored in.

    What a model computes from them has the class, and no layer: attention then refuses
    it, where plain tensors would be attended without the tokens of earlier passes.
    """

    layer: PagedLayer | None = None


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: FP8 or 16-bit pages, and a page table of its own.

    `update` hands the pass's keys to the attention function, which stores them and
    attends: only it knows the padding. All queries, those of the prompt included, see
    the stored keys, so that the bits of a token do not depend on the pass it came in.
    """

    is_croppable: ClassVar[bool] = True
    is_sliding: ClassVar[bool] = False

    def __init__(
        self,
        *,
        kv_cache_dtype: str = "fp8",
        page_size: int = 64,
        scales: KVScales | None = None,
        route: Route | None = None,
    ) -> None:
        """An empty layer.

        Args:
          kv_cache_dtype: As `resolve_kv_cache_dtype` takes it; "auto" follows the model.
          page_size: Tokens of a page, 1 to 65536.
          scales: Dequantisation scales; None is 1.0.
          route: The route to run; None lets `plan_route` choose.

        Raises:
          InvalidArgumentError: ``page_size`` is no int or outside its range.
        """
        super().__init__()
        check_page_size(page_size)
        self.kv_cache_dtype = kv_cache_dtype
        self.page_size = page_size
        self.scales = scales
        self.route = route
        self._tokens = 0
        self._left_padding: torch.Tensor | None = None
        self._unwritten: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the page table of the batch of ``key_states`` [batch, kv_heads, tokens, head_dim].

        Raises:
          UnsupportedError: Keys and values of different shapes, as latent attention has them.
        """
        if key_states.shape != value_states.shape:
            raise UnsupportedError(
                f"value_states: shape {list(value_states.shape)}; accepted: "
                f"{list(key_states.shape)}, as key_states"
            )
        batch, kv_heads, _, head_dim = key_states.shape
        self.batch_size = batch
        dtype = torch_dtype(
            resolve_kv_cache_dtype(
                self.kv_cache_dtype, model_dtype=key_states.dtype, device=key_states.device
            )
        )
        self.keys = torch.empty(
            (0, self.page_size, kv_heads, head_dim), dtype=dtype, device=key_states.device
        )
        self.values = torch.empty_like(self.keys)
        self._page_table = torch.empty((batch, 0), dtype=torch.int32, device=key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys and values of a pass, [batch, kv_heads, tokens, head_dim].

        Returns:
          The same tensors, for the attention function.

        Raises:
          InvalidArgumentError: Another batch than before, or nothing attended the pass before.
        """
        if self._unwritten is not None:
            raise InvalidArgumentError(
                "past_key_values: the attention of the pass before was not flashverify's; "
                "accepted: a model that enable() was called with"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise InvalidArgumentError(
                f"past_key_values: holds {self.batch_size} sequences, and the pass has "
                f"{key_states.shape[0]}; accepted: the same number"
            )
        self._unwritten = (key_states, value_states)
        self._tokens += key_states.shape[2]
        keys = key_states.as_subclass(LayerKeys)
        keys.layer = self
        return keys, value_states

    def attend(
        self,
        query: torch.Tensor,
        mask: PagedMask,
        *,
        scale: float | None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the keys and values of the pass, and attends its queries to all of them.

        Args:
          query: [batch, q_heads, tokens, head_dim].
          mask: The visibility of this pass.
          scale: Factor of the scores; None is 1 / sqrt(head_dim).
          softcap: c > 0 maps a scaled score x to c * tanh(x / c); 0 is none.
          sinks: float32 [q_heads], logits that add to the denominator alone.

        Returns:
          [batch, tokens, q_heads, head_dim] of query's dtype; 0 at padding.

        Raises:
          InvalidArgumentError: The mask is of another pass, or its padding not that of
            the passes before.
          UnsupportedError: What no route computes.
        """
        if self._unwritten is None or mask.kv_tokens != self._tokens:
            raise InvalidArgumentError(
                f"attention_mask: {mask.kv_tokens} tokens, and the cache holds {self._tokens}; "
                "accepted: the mask of the pass that updated the cache"
            )
        q_tokens = query.shape[2]
        self._check_padding(mask, first=self._tokens == q_tokens)
        self._write()
        rows = query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])
        page_table, seq_lens, query_start_loc = self._blocks(query)
        out = paged_attention(
            rows,
            self.keys,
            self.values,
            page_table,
            seq_lens,
            query_start_loc=query_start_loc,
            scale=scale,
            window=mask.window,
            softcap=softcap,
            sinks=sinks,
            k_dequant_scale=self.scales.k if self.scales else None,
            v_dequant_scale=self.scales.v if self.scales else None,
            route=self.route,
        )
        return out.view(self.batch_size, q_tokens, *out.shape[1:])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a pass of ``query_length`` will see, and the first one's index."""
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored for each sequence, padding included."""
        return self._tokens

    def get_max_length(self) -> int:
        """-1: the layer grows as long as memory lasts."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens; their pages stay for the next ones.

        Raises:
          InvalidArgumentError: A positive number, or more tokens than there are.
        """
        if not -self._tokens <= tokens_to_remove <= 0:
            raise InvalidArgumentError(
                f"tokens_to_remove: {tokens_to_remove}; accepted: {-self._tokens} to 0, minus "
                "the number of tokens to remove"
            )
        self._tokens += tokens_to_remove

    def reset(self) -> None:
        """Forgets all tokens; the pages stay."""
        self._tokens = 0
        self._left_padding = None
        self._unwritten = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was, int64 [batch]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes ``repeats`` neighbouring ones."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The sequences become those of ``indices``, int64 or bool, in that order."""
        if not self.is_initialized:
            return
        table = self._page_table[indices.to(self._page_table.device)]
        flat = table.flatten()
        for name in ("keys", "values"):
            pages = getattr(self, name)
            # Only integers can be gathered: the eight-bit floats have no index_select.
            codes = pages.view(torch.uint8 if pages.element_size() == 1 else torch.int16)
            setattr(self, name, codes[flat].view(pages.dtype))
        self._page_table = torch.arange(
            flat.numel(), dtype=torch.int32, device=table.device
        ).view_as(table)
        self.batch_size = len(table)
        if self._left_padding is not None:
            self._left_padding = self._left_padding[indices.to(table.device)]

    def offload(self) -> None:
        """Not for pages: raises UnsupportedError."""
        raise UnsupportedError("offloading: of a paged cache; accepted: a cache without it")

    def _check_padding(self, mask: PagedMask, *, first: bool) -> None:
        if first:
            self._left_padding = mask.left_padding
            return
        before, now = self._left_padding, mask.left_padding
        if before is None and now is None:
            return
        none = torch.zeros(self.batch_size, dtype=torch.int32, device=self.keys.device)
        if not torch.equal(none if before is None else before, none if now is None else now):
            raise InvalidArgumentError(
                f"attention_mask: {_counts(now)} tokens of left padding, and {_counts(before)} in "
                "the passes before; accepted: the same padding in every pass"
            )

    def _write(self) -> None:
        """Appends the pass's keys and values; padding is not stored."""
        assert self._unwritten is not None
        keys, values = self._unwritten
        self._unwritten = None
        q_tokens = keys.shape[2]
        self._reserve(self._tokens)
        places = torch.arange(self._tokens - q_tokens, self._tokens, device=keys.device)
        places = places.expand(self.batch_size, -1)
        if self._left_padding is not None:
            places = places - self._left_padding[:, None]
        pages = self._page_table.gather(1, places.clamp(min=0) // self.page_size)
        slots = torch.where(places < 0, -1, pages * self.page_size + places % self.page_size)
        append_kv(
            keys.transpose(1, 2).flatten(0, 1),
            values.transpose(1, 2).flatten(0, 1),
            self.keys,
            self.values,
            slots.flatten(),
            k_dequant_scale=self.scales.k if self.scales else None,
            v_dequant_scale=self.scales.v if self.scales else None,
        )

    def _reserve(self, tokens: int) -> None:
        """Makes the page table hold ``tokens`` of each sequence."""
        batch, columns = self._page_table.shape
        needed = -(-tokens // self.page_size)
        if needed <= columns:
            return
        wanted = max(needed, 2 * columns)
        held = batch * columns
        for name in ("keys", "values"):
            pages = getattr(self, name)
            larger = pages.new_empty((batch * wanted, *pages.shape[1:]))
            larger[:held] = pages
            setattr(self, name, larger)
        added = torch.arange(
            held, batch * wanted, dtype=torch.int32, device=self._page_table.device
        )
        self._page_table = torch.cat([self._page_table, added.view(batch, -1)], dim=1)

    def _blocks(
        self, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Page table, lengths and query offsets of the pass, in blocks that a kernel takes.

        A block of a long prompt is a request of its own over the same pages; a row's
        bits do not depend on where blocks end.
        """
        device = query.device
        most = self._most_rows(query)
        q_tokens = query.shape[2]
        seq_lens = torch.full((self.batch_size,), self._tokens, dtype=torch.int32, device=device)
        if self._left_padding is not None:
            seq_lens -= self._left_padding
        if q_tokens <= most:
            return self._page_table, seq_lens, None
        ends = [*range(most, q_tokens, most), q_tokens]
        last_rows = torch.tensor(ends, dtype=torch.int32, device=device)
        # Where a block is all padding its rows see nothing.
        block_lens = (seq_lens[:, None] - q_tokens + last_rows).clamp(min=0).flatten()
        first_rows = torch.arange(self.batch_size, device=device)[:, None] * q_tokens
        starts = (first_rows + torch.tensor([0, *ends[:-1]], device=device)).flatten()
        total = starts.new_tensor([self.batch_size * q_tokens])
        return (
            self._page_table.repeat_interleave(len(ends), dim=0),
            block_lens,
            torch.cat([starts, total]).to(torch.int32),
        )

    def _most_rows(self, query: torch.Tensor) -> int:
        """Query tokens of one request that the route takes."""
        device = query.device
        plan = plan_route(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            kv_cache_dtype=self.keys.dtype,
            q_dtype=query.dtype,
            q_len=1,
            head_dim=query.shape[3],
            group=query.shape[1] // self.keys.shape[2],
            page_size=self.page_size,
            route=self.route,
        )
        return KERNEL_LIMITS[device.type, plan.route].q_lens[-1]


def _counts(padding: torch.Tensor | None) -> str:
    return "no" if padding is None else str(padding.tolist())
