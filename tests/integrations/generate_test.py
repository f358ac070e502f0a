"""Generation: speculation, batches and beams change no bit where they must not."""

import pytest
import torch

import flashverify as fv
from flashverify.integrations.transformers import enable
from tests.integrations import models

NEW_TOKENS = 32
GREEDY = {
    "do_sample": False,
    "max_new_tokens": NEW_TOKENS,
    "output_logits": True,
    "return_dict_in_generate": True,
}


class Passes:
    """The query lengths of a model's forward passes."""

    def __init__(self, model):
        self.lengths = []
        self._hook = model.model.layers[0].register_forward_pre_hook(self._note)

    def _note(self, _module, args):
        self.lengths.append(args[0].shape[1])

    def take(self):
        taken, self.lengths = self.lengths, []
        return taken


def same(left, right):
    """Whether two generations have the same tokens and the same bits in all logits."""
    return torch.equal(left.sequences, right.sequences) and torch.equal(
        torch.stack(left.logits), torch.stack(right.logits)
    )


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2", "bfloat16"])
def test_prompt_lookup_changes_no_bit(kind, kv_cache_dtype):
    model = models.make(kind)
    passes = Passes(model)
    for seed in range(2):
        tokens = models.prompt(80, seed=seed)
        with (
            enable(model, kv_cache_dtype=kv_cache_dtype, row_invariant_linears=True),
            fv.require_route("grouped_fp32"),
        ):
            plain = model.generate(tokens, **GREEDY)
            assert passes.take() == [80] + [1] * (NEW_TOKENS - 1)
            drafted = model.generate(tokens, prompt_lookup_num_tokens=7, **GREEDY)
        lengths = passes.take()
        # The first pass takes the prompt and the first drafts together.
        assert lengths[0] == 87 and 8 in lengths[1:]
        assert same(plain, drafted)


@torch.inference_mode()
def test_drafts_are_accepted():
    """On a text that repeats itself there are fewer passes than tokens."""
    model = models.make(layers=1, initializer_range=0.02)
    passes = Passes(model)
    with enable(model, row_invariant_linears=True):
        plain = model.generate(models.prompt(80), **GREEDY)
        passes.take()
        drafted = model.generate(models.prompt(80), prompt_lookup_num_tokens=7, **GREEDY)
    assert same(plain, drafted)
    assert len(passes.take()) < NEW_TOKENS / 2


@torch.inference_mode()
@pytest.mark.parametrize("assistant_enabled", [False, True])
def test_an_assistant_changes_no_bit(assistant_enabled):
    model, assistant = models.make(), models.make(layers=1)
    passes = Passes(model)
    tokens = models.prompt(40)
    with enable(model, row_invariant_linears=True):
        plain = model.generate(tokens, **GREEDY)
        passes.take()
        other = enable(assistant) if assistant_enabled else None
        assisted = model.generate(tokens, assistant_model=assistant, **GREEDY)
        if other is not None:
            other.disable()
    assert any(length > 1 for length in passes.take()[1:])
    assert same(plain, assisted)


@torch.inference_mode()
def test_a_row_of_a_padded_batch_is_what_it_is_alone():
    model = models.make()
    prompts = [models.prompt(tokens, seed=tokens) for tokens in (70, 3, 41)]
    padded = torch.cat([torch.cat([p.new_zeros(1, 70 - p.shape[1]), p], dim=1) for p in prompts])
    with enable(model, row_invariant_linears=True):
        batch = model.generate(padded, attention_mask=(padded > 0).long(), **GREEDY)
        for index, tokens in enumerate(prompts):
            alone = model.generate(tokens, **GREEDY)
            assert torch.equal(batch.sequences[index, 70:], alone.sequences[0, tokens.shape[1] :])
            together = torch.stack([step[index] for step in batch.logits])
            assert torch.equal(together, torch.cat(alone.logits))


@torch.inference_mode()
def test_beams_take_their_pages_with_them():
    model = models.make()
    beams = {"do_sample": False, "max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    with enable(model, page_size=4, row_invariant_linears=True):
        cached = model.generate(models.prompt(30), **beams)
        # Without a cache every step computes the whole text anew.
        anew = model.generate(models.prompt(30), use_cache=False, **beams)
    assert torch.equal(cached, anew)


@torch.inference_mode()
def test_a_conversation_goes_on_in_its_cache():
    model = models.make()
    with enable(model, row_invariant_linears=True) as integration:
        cache = integration.new_cache()
        first = model.generate(models.prompt(20), past_key_values=cache, **GREEDY)
        longer = torch.cat([first.sequences, models.prompt(9, seed=1)], dim=1)
        assert cache.get_seq_length() == first.sequences.shape[1] - 1
        again = model.generate(longer, past_key_values=cache, **GREEDY)
        fresh = model.generate(longer, **GREEDY)
    assert same(again, fresh)
