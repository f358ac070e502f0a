"""SmolLM2-135M-Instruct as a transformers model, from the GGUF file of a package.

No model hub takes part: weights, configuration and tokeniser all come from the file.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.capture_kv import llama, tokens

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """The model of a GGUF file of the Llama architecture with tied embeddings, for inference.

    Raises ModelError for a file that is none.
    """
    source = llama.Llama(path)
    read = source.config
    tensors = {tensor.name: tensor for tensor in source.reader.tensors}

    def weight(name: str) -> torch.Tensor:
        if name not in tensors:
            raise llama.ModelError(f"{path}: no tensor {name!r}")
        wide = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        return torch.from_numpy(wide.astype(np.float32))

    embeddings = weight("token_embd.weight")
    state = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": embeddings,
        "model.norm.weight": weight("output_norm.weight"),
    }
    for layer in range(read.layers):
        for theirs, ours in _LAYER_TENSORS.items():
            found = weight(f"blk.{layer}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):
                found = _halves(found, read.head_dim)
            state[f"model.layers.{layer}.{ours}.weight"] = found
    config = LlamaConfig(
        vocab_size=embeddings.shape[0],
        hidden_size=embeddings.shape[1],
        intermediate_size=state["model.layers.0.mlp.gate_proj.weight"].shape[0],
        num_hidden_layers=read.layers,
        num_attention_heads=read.q_heads,
        num_key_value_heads=read.kv_heads,
        head_dim=read.head_dim,
        max_position_embeddings=read.context,
        rope_parameters={"rope_type": "default", "rope_theta": read.rope_base},
        rms_norm_eps=read.norm_epsilon,
        tie_word_embeddings=True,
        bos_token_id=_token(source, "bos"),
        eos_token_id=_token(source, "eos"),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").to(dtype)
    model.load_state_dict({name: found.to(dtype) for name, found in state.items()})
    model.tie_weights()
    # Computed by the constructor, and lost on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def save(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the model of a GGUF file and its tokeniser as engines read them from a folder."""
    load(path, dtype).save_pretrained(folder)
    reader = llama.Llama(path).reader
    tokeniser = tokens.tokenizer(reader)
    tokeniser.save(str(folder / "tokenizer.json"))
    words = {kind: tokeniser.id_to_token(_token_of_reader(reader, kind)) for kind in ("bos", "eos")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words["bos"],
        "eos_token": words["eos"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """GGUF stores the two halves that RoPE turns as neighbours; transformers one by one."""
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _token(source: llama.Llama, kind: str) -> int:
    return _token_of_reader(source.reader, kind)


def _token_of_reader(reader: Any, kind: str) -> int:
    field = reader.get_field(f"tokenizer.ggml.{kind}_token_id")
    if field is None:
        raise llama.ModelError(f"the model's metadata has no {kind}_token_id")
    return int(field.contents())
