"""Generates with vLLM in this process, greedily, and says what it did as JSON.

Usage: arm.py REQUEST_FILE RESULT_FILE. The request holds `engine` (arguments of
vllm.LLM), `prompts` (texts), `max_tokens` and `together` (all prompts at once, or one
after the other). The result holds per prompt `tokens` and `logprobs` (as exact
hexadecimal numbers), the engine's counters, and the calls per route.
"""

import json
import sys
from pathlib import Path


def generate(request):
    """The result of a request."""
    from vllm import LLM, SamplingParams

    import flashverify

    llm = LLM(
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=1024,
        disable_log_stats=False,
        **request["engine"],
    )
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in request["prompts"]]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], logprobs=1, ignore_eos=True
    )
    if request["together"]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    else:
        outputs = [llm.generate([one], sampling, use_tqdm=False)[0] for one in prompts]
    completions = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(completion.token_ids) for completion in completions],
        "logprobs": [
            [
                float(at[token].logprob).hex()
                for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            for completion in completions
        ],
        "counters": {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        },
        "routes": {str(route): count for route, count in flashverify.route_counts().items()},
    }


def main(request, result):
    """Reads the request, writes the result."""
    text = json.dumps(generate(json.loads(Path(request).read_text())))
    Path(result).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
