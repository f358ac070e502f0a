"""The model's own tokeniser, built from the GGUF metadata."""

from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tools.capture_kv.llama import ModelError

# The pre-tokenisers that are known to be "each digit alone, then GPT-2's pattern".
_DIGITS_THEN_GPT2 = ("smollm",)

_CONTROL_TOKEN = 3


def tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """Byte-level BPE with the vocabulary, merges and control tokens of the file."""

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.ggml.{name}")
        if found is None:
            raise ModelError(f"the model's metadata has no 'tokenizer.ggml.{name}'")
        return found.contents()

    kind, pre_tokenizer = field("model"), field("pre")
    if kind != "gpt2" or pre_tokenizer not in _DIGITS_THEN_GPT2:
        raise ModelError(f"tokeniser {kind!r} with pre-tokeniser {pre_tokenizer!r} is not known")
    words = field("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    built = tokenizers.Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    kinds = field("token_type")
    built.add_special_tokens([w for w, k in zip(words, kinds, strict=True) if k == _CONTROL_TOKEN])
    return built
