"""A small Llama in FP32 PyTorch, read from a GGUF file, that shows its attention inputs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional


class ModelError(Exception):
    """The file is no model that this program runs."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What the GGUF metadata says of the model."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_base: float
    norm_epsilon: float


class Llama:
    """Weights stay as stored until a block needs them, then FP32."""

    def __init__(self, path: Path) -> None:
        try:
            self.reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path} as GGUF: {error}") from error
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path}: architecture is {architecture!r}, expected 'llama'")
        self.name = str(self._field("general.name"))
        q_heads = int(self._field("llama.attention.head_count"))
        self.config = Config(
            layers=int(self._field("llama.block_count")),
            q_heads=q_heads,
            kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=int(self._field("llama.embedding_length")) // q_heads,
            context=int(self._field("llama.context_length")),
            rope_base=float(self._field("llama.rope.freq_base")),
            norm_epsilon=float(self._field("llama.attention.layer_norm_rms_epsilon")),
        )
        self._weights: dict[str, torch.Tensor] = {}
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def attention_inputs(
        self, tokens: Sequence[int], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V of one layer as its attention takes them, Q and K after RoPE.

        float32 [tokens, heads, head_dim] each.
        """
        if not 0 <= layer < self.config.layers:
            raise ModelError(f"layer {layer}: the model has 0 to {self.config.layers - 1}")
        hidden = self._embed(tokens)
        for index in range(layer):
            hidden = self._block(hidden, index)
        return self._qkv(hidden, layer)

    def next_token_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each of ``tokens``, float32 [tokens, vocabulary]."""
        hidden = self._embed(tokens)
        for index in range(self.config.layers):
            hidden = self._block(hidden, index)
        # Models with tied embeddings have no output matrix of their own.
        name = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return self._norm(hidden, "output_norm.weight") @ self._weight(name).T

    def _block(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in self._qkv(hidden, layer))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        rows = attended[0].transpose(0, 1).flatten(1)
        hidden = hidden + rows @ self._weight(f"blk.{layer}.attn_output.weight").T
        normed = self._norm(hidden, f"blk.{layer}.ffn_norm.weight")
        gate = torch.nn.functional.silu(normed @ self._weight(f"blk.{layer}.ffn_gate.weight").T)
        up = normed @ self._weight(f"blk.{layer}.ffn_up.weight").T
        return hidden + (gate * up) @ self._weight(f"blk.{layer}.ffn_down.weight").T

    def _qkv(
        self, hidden: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed = self._norm(hidden, f"blk.{layer}.attn_norm.weight")
        q, k, v = (
            (normed @ self._weight(f"blk.{layer}.attn_{name}.weight").T).view(
                len(hidden), -1, self.config.head_dim
            )
            for name in ("q", "k", "v")
        )
        return self._rotate(q), self._rotate(k), v

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """RoPE on neighbouring pairs: GGUF stores Llama's Q and K rows in that order."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        frequencies = self.config.rope_base**-exponents
        angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * frequencies
        cosine, sine = (f(angles).to(torch.float32)[:, None] for f in (torch.cos, torch.sin))
        even, odd = heads[..., 0::2], heads[..., 1::2]
        turned = (even * cosine - odd * sine, even * sine + odd * cosine)
        return torch.stack(turned, dim=-1).flatten(-2)

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], self._weight(name), self.config.norm_epsilon
        )

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        if not 0 < len(tokens) <= self.config.context:
            raise ModelError(f"{len(tokens)} tokens: the model takes 1 to {self.config.context}")
        return self._weight("token_embd.weight")[torch.tensor(tokens)]

    def _weight(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the model has no tensor {name!r}")
        if name not in self._weights:
            wide = gguf.dequantize(tensor.data, tensor.tensor_type)
            self._weights[name] = torch.from_numpy(wide.astype(np.float32))
        return self._weights[name]

    def _field(self, name: str) -> Any:
        field = self.reader.get_field(name)
        if field is None:
            raise ModelError(f"the model's metadata has no {name!r}")
        return field.contents()
