"""Tiny random transformers models, and a cache that quantises as the definition says."""

from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from tests.oracle import fp8

VOCABULARY = 64

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    # Large enough that attention is not uniform, and that greedy text is not one word.
    "initializer_range": 0.2,
}

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": 16},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}


def make(kind: str = "llama", *, layers: int = 2, dtype: torch.dtype = torch.bfloat16, **more: Any):
    """A model with random weights, the same for equal arguments, that never ends a text."""
    config_class, model_class, own = CLASSES[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**_SIZES, **own, "num_hidden_layers": layers, **more}))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model.to(dtype).eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """int64 [1, tokens] without the padding's token; the second half repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(1, VOCABULARY, (1, -(-tokens // 2)), generator=generator)
    return half.repeat(1, 2)[:, :tokens]


class QuantisedLayer(DynamicLayer):
    """transformers' own growing cache, holding what FP8 makes of keys and values."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Quantises by the tests' own tables, then does what the class does."""
        stored = (_through_e4m3(states) for states in (key_states, value_states))
        return super().update(*stored, *args, **kwargs)


def _through_e4m3(states: torch.Tensor) -> torch.Tensor:
    codes = fp8.E4M3.encode(states.double())
    return fp8.E4M3.decode(codes).to(states.dtype)


def quantised_cache(model) -> transformers.Cache:
    """A cache of `QuantisedLayer`s."""
    return transformers.Cache(
        layers=[QuantisedLayer() for _ in range(model.config.num_hidden_layers)]
    )
