"""vLLM's server with the plugin: one start, completions, and its counters."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.engines.support import MODEL, NGRAM, PROMPTS, generate, variables

MAX_TOKENS = 32
OPTIONS = {"row_invariant_linears": True}
START_SECONDS = 400


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server in a process of its own."""

    def __init__(self, folder):
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "server.log"
        host, port = self.address.split(":")
        arguments = {
            "model": MODEL,
            "served-model-name": "smollm2",
            "host": host,
            "port": port,
            "dtype": "bfloat16",
            "kv-cache-dtype": "fp8",
            "kv-cache-memory-bytes": 256 << 20,
            "max-model-len": 1024,
            "max-num-seqs": 8,
            "speculative-config": json.dumps(NGRAM),
            "additional-config": json.dumps({"flashverify": OPTIONS}),
        }
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        environment = variables(folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )

    def get(self, path, body=None):
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.read().decode()

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
            else:
                return
        raise AssertionError(self.log.read_text())

    def stop(self):
        self.process.terminate()
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("server"))
    try:
        running.wait()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()


def counter(text, name):
    """The sum of a counter over its labels."""
    values = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert values, f"no {name} in the metrics"
    return sum(map(float, values))


def test_the_server_serves_the_bits_of_the_library(server, tmp_path):
    alone, _ = generate(tmp_path, options=OPTIONS, max_tokens=MAX_TOKENS)
    for prompt, tokens, logprobs in zip(PROMPTS, alone["tokens"], alone["logprobs"], strict=True):
        body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = json.loads(server.get("/v1/completions", body))["choices"]
        assert choice["token_ids"] == tokens
        # Bit for bit: JSON carries the shortest number that reads back as the same double.
        assert choice["logprobs"]["token_logprobs"] == [float.fromhex(x) for x in logprobs]


def test_the_metrics_count_what_was_accepted(server):
    text = server.get("/metrics")
    drafted = counter(text, "vllm:spec_decode_num_draft_tokens_total")
    accepted = counter(text, "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted
    assert counter(text, "vllm:generation_tokens_total") == MAX_TOKENS * len(PROMPTS)
    assert accepted == counter(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total")


def test_the_log_says_who_is_in_control(server):
    log = server.log.read_text()
    assert "flashverify: route grouped_fp32 controls the attention of 30 layers" in log
    assert "the first attention call ran grouped_fp32, as the native library says" in log
    assert "row-invariant linears on" in log


def test_the_server_stops_when_asked(server):
    assert server.stop() == 0
