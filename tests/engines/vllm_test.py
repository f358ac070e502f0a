"""vLLM on this CPU with a FP8 cache: the same bits alone, verified, and in a batch."""

import pytest

from tests.engines.support import LAYERS, NGRAM, PROMPTS, generate

MAX_TOKENS = 64
INVARIANT = {"row_invariant_linears": True}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def decode(scratch):
    return generate(scratch / "decode", options=INVARIANT, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def verified(scratch):
    return generate(
        scratch / "verified", options=INVARIANT, max_tokens=MAX_TOKENS, speculative_config=NGRAM
    )


@pytest.fixture(scope="module")
def batch(scratch):
    return generate(scratch / "batch", options=INVARIANT, max_tokens=MAX_TOKENS, together=True)


@pytest.fixture(scope="module")
def half(scratch):
    options = {**INVARIANT, "route": "grouped_half"}
    return generate(scratch / "half", options=options, max_tokens=MAX_TOKENS, together=True)


def same_bits(one, other):
    return one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]


def test_verification_gives_the_bits_of_decoding(decode, verified):
    assert [len(tokens) for tokens in decode[0]["tokens"]] == [MAX_TOKENS] * len(PROMPTS)
    assert same_bits(decode[0], verified[0])


def test_a_batch_gives_the_bits_of_its_requests(decode, batch):
    assert same_bits(decode[0], batch[0])


def test_other_arithmetic_gives_other_bits(batch, half):
    assert not same_bits(batch[0], half[0])


def test_drafts_were_verified_and_accepted(decode, verified):
    counters = verified[0]["counters"]
    assert counters["vllm:spec_decode_num_drafts"] > 0
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted <= drafted
    assert counters["vllm:spec_decode_num_drafts"] * NGRAM["num_speculative_tokens"] >= drafted
    # What is accepted needs no pass of its own; past a request's end it saves none.
    saved = decode[0]["routes"]["grouped_fp32"] - verified[0]["routes"]["grouped_fp32"]
    past_the_end = len(PROMPTS) * NGRAM["num_speculative_tokens"]
    assert LAYERS * (accepted - past_the_end) <= saved <= LAYERS * accepted
    assert saved > 0


@pytest.mark.parametrize("arm", ["decode", "verified", "batch"])
def test_one_route_did_all_of_it(arm, request):
    result, log = request.getfixturevalue(arm)
    calls = result["routes"]["grouped_fp32"]
    assert sum(result["routes"].values()) == calls
    assert calls > 0 and calls % LAYERS == 0
    assert "flashverify: route grouped_fp32 controls the attention of 30 layers" in log
    assert "the first attention call ran grouped_fp32, as the native library says" in log


def test_each_step_of_each_layer_is_one_call(decode):
    # One prefill gives the first token, and a step each of the others.
    assert decode[0]["routes"]["grouped_fp32"] == LAYERS * MAX_TOKENS * len(PROMPTS)


def test_a_named_half_route_runs_and_says_so(half):
    result, log = half
    assert result["routes"]["grouped_half"] > 0
    assert result["routes"]["grouped_fp32"] == 0
    assert "flashverify: route grouped_half controls the attention of 30 layers" in log


def test_a_long_prompt_among_short_ones(scratch, decode):
    """Prefill, decode and verification rows of different lengths in the same steps."""
    long = " ".join(PROMPTS) * 3
    result, _ = generate(
        scratch / "mixed",
        options=INVARIANT,
        max_tokens=MAX_TOKENS,
        together=True,
        prompts=[*PROMPTS, long],
        max_num_batched_tokens=128,
        speculative_config=NGRAM,
    )
    tokens, logprobs = result["tokens"], result["logprobs"]
    assert tokens[: len(PROMPTS)] == decode[0]["tokens"]
    assert logprobs[: len(PROMPTS)] == decode[0]["logprobs"]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "resolved"), [("fp8_e5m2", "fp8_e5m2"), ("auto", "bfloat16")]
)
def test_other_caches_keep_their_bits_too(scratch, decode, kv_cache_dtype, resolved):
    settings = {
        "options": INVARIANT,
        "max_tokens": 24,
        "prompts": PROMPTS[:3],
        "kv_cache_dtype": kv_cache_dtype,
    }
    batch, log = generate(scratch / f"{resolved}_batch", together=True, **settings)
    verified, _ = generate(scratch / f"{resolved}_verified", speculative_config=NGRAM, **settings)
    assert f"; cache {resolved}, page_size 16, " in log
    assert same_bits(batch, verified)
    assert verified["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert batch["logprobs"] != [row[:24] for row in decode[0]["logprobs"][:3]]


def test_fp32_logits_are_other_logits_of_the_same_bits(scratch, decode):
    settings = {
        "options": {**INVARIANT, "fp32_logits": True},
        "max_tokens": 24,
        "prompts": PROMPTS[:3],
    }
    batch, log = generate(scratch / "logits_batch", together=True, **settings)
    verified, _ = generate(scratch / "logits_verified", speculative_config=NGRAM, **settings)
    assert "FP32 logits on" in log
    assert same_bits(batch, verified)
    assert batch["logprobs"] != [row[:24] for row in decode[0]["logprobs"][:3]]
