"""What the engine's tests share: its process, and its settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = Path(os.environ["MODEL"]).absolute().parent
LAYERS = 30

NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
PROMPTS = [
    "The lighthouse keeper wrote: the sea is calm, the sea is calm, the sea is",
    "List the numbers: one, two, three, four, one, two, three, four, one, two,",
    "Once upon a time there was a small",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "Repeat: red green blue red green blue red green",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
]


def variables(scratch, **others):
    """The environment variables of an engine that keeps its files in a scratch folder."""
    return {
        **os.environ,
        "HOME": str(scratch),
        # A header that torch compiles at its first use serves every engine of a test.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch.parent / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(scratch / "cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Without Intel's OpenMP, spinning threads take the time of those that work.
        "OMP_WAIT_POLICY": "passive",
        **others,
    }


def run(scratch, *arguments, **others):
    """Runs this environment's Python; its status, and all that it wrote."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=scratch,
        env=variables(scratch, **others),
    )
    return done.returncode, done.stdout


def generate(scratch, *, options=None, together=False, max_tokens=64, prompts=PROMPTS, **engine):
    """Runs arm.py; its result, and what the engine logged.

    `options` are flashverify's, `engine` further arguments of vllm.LLM.
    """
    settings = {
        "model": str(MODEL),
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "additional_config": {"flashverify": options or {}},
        **engine,
    }
    request = {
        "engine": settings,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "together": together,
    }
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "request.json").write_text(json.dumps(request))
    status, log = run(scratch, FOLDER / "arm.py", "request.json", "result.json")
    assert status == 0, log
    return json.loads((scratch / "result.json").read_text()), log
