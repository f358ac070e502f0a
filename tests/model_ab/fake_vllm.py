"""What stands for an environment's Python in tests: a vLLM, and a flashverify, that are none.

    fake_vllm.py SETTINGS -m vllm.entrypoints.openai.api_server --host … --port … …
    fake_vllm.py SETTINGS -m flashverify --json

SETTINGS is a JSON file, by route ("none" without one): ``exit`` ends the server at start,
``logs`` is the route it claims, ``ran`` the one that it says ran, ``load`` a native file to
map, ``noise`` what is added to log-probabilities, ``token`` the token it generates.
"""

import argparse
import ctypes
import json
import math
import sys
import time
from pathlib import Path

from tests.acceptance.fake_server import FakeServer, serve


def main():
    """What the arguments ask for; the exit status."""
    settings_by_route = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[3] == "flashverify":
        print(json.dumps(settings_by_route["info"]))
        return 0
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "model", "served-model-name", "dtype", "kv-cache-dtype"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--additional-config", default="{}")
    options, _ = parser.parse_known_args(sys.argv[4:])
    route = json.loads(options.additional_config).get("flashverify", {}).get("route", "none")
    settings = settings_by_route.get(route, {})
    if "exit" in settings:
        print("ValueError: no memory for the cache", flush=True)
        return int(settings["exit"])
    handles = [ctypes.CDLL(path) for path in settings.get("load", [])]
    claimed = settings.get("logs", route)
    if claimed != "none":
        print(
            f"(Worker) flashverify: route {claimed} controls the attention of 2 layers", flush=True
        )
    token = settings.get("token", 7)

    def complete(server, body):
        if len(server.bodies) == 1 and claimed != "none":
            ran = settings.get("ran", claimed)
            words = f"flashverify: the first attention call ran {ran}, as the native library says"
            print(words, flush=True)
        prompt = body["prompt"]
        server.count(body)
        noise = settings.get("noise", 0.0)
        entries = [
            {str(id_): {"logprob": -1.0 - id_ % 3 + noise * math.sin(place)}}
            for place, id_ in enumerate(prompt)
        ]
        count = body["max_tokens"]
        return {
            "choices": [
                {
                    "text": "x" * count,
                    "finish_reason": "length",
                    "token_ids": [token] * count,
                    "logprobs": {"token_logprobs": [-0.5 + noise] * count},
                    "prompt_logprobs": [None, *entries[1:]] if "prompt_logprobs" in body else None,
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": count},
        }

    fake = FakeServer(complete)
    with serve(fake, port=int(options.port)):
        while handles is not None:
            time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
