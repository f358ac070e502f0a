"""SmolLM2-135M through transformers: speculation accepts tokens and changes no bit."""

import pytest
import torch

import flashverify as fv
from flashverify.integrations.transformers import enable
from tools.capture_kv import llama, main, tokens
from tools.smollm2 import model as smollm2

NEW_TOKENS = 40
PROMPTS = {
    "free": "The old lighthouse keeper looked at the sea and said",
    "repetitive": "red, green, blue, red, green, blue, red, green, blue, red, green,",
}


@pytest.fixture(scope="module")
def model():
    found = smollm2.load(main.default_model())
    found.generation_config.eos_token_id = None
    found.generation_config.pad_token_id = 0
    return found


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.tokenizer(llama.Llama(main.default_model()).reader)


@torch.inference_mode()
def test_the_weights_are_read_right(tokenizer):
    """Logits of the other reader of the same file, which has tests of its own."""
    ids = tokenizer.encode(PROMPTS["free"]).ids
    expected = llama.Llama(main.default_model()).next_token_logits(ids)
    found = smollm2.load(main.default_model(), torch.float32)(torch.tensor([ids])).logits[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("name", PROMPTS)
def test_speculation_changes_no_bit(model, tokenizer, name):
    prompt = torch.tensor([tokenizer.encode(PROMPTS[name]).ids])
    greedy = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    passes = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    before = fv.route_counts()
    with enable(model, row_invariant_linears=True):
        plain = model.generate(prompt, **greedy)
        plain_passes = len(passes)
        drafted = model.generate(prompt, prompt_lookup_num_tokens=7, **greedy)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert torch.equal(torch.stack(plain.logits), torch.stack(drafted.logits))
    ran = {route: count - before[route] for route, count in fv.route_counts().items()}
    assert ran.pop(fv.Route.grouped_fp32) == 30 * len(passes)
    assert set(ran.values()) == {0}
    assert plain_passes == NEW_TOKENS
    if name == "repetitive":
        # Seven drafts and one token more in a pass, all accepted, would be five passes.
        assert len(passes) - plain_passes < NEW_TOKENS / 2
        assert 8 in passes
