"""A small server that speaks as much of the interface as acceptance and model_ab ask for."""

import contextlib
import http.server
import json
import threading


class FakeServer:
    """Answers completions by a script, and counts as vLLM does.

    ``on_complete(server, body)`` is called for each completion, before the answer; it may
    count what it wants and returns fields that replace those of the answer.
    """

    def __init__(self, on_complete=None, *, labels='engine="0",model_name="m"', version="9.9"):
        self.labels = labels
        self.version = version
        self.counters = dict.fromkeys(
            ("drafts", "draft_tokens", "accepted", "generated", "finished", "running"), 0
        )
        self.by_position = [0, 0, 0]
        self.bodies = []
        self.extra_lines = []
        self.left_out = ()
        self.metrics_text = None
        self._on_complete = on_complete or (lambda server, body: server.count(body))

    def count(self, body, *, tokens=None, drafts=2, accepted=(2, 1, 0)):
        """What the engine counts for one request of its own."""
        tokens = body["max_tokens"] if tokens is None else tokens
        self.counters["drafts"] += drafts
        self.counters["draft_tokens"] += 3 * drafts
        self.counters["accepted"] += sum(accepted)
        self.by_position = [a + b for a, b in zip(self.by_position, accepted, strict=True)]
        self.counters["generated"] += tokens
        self.counters["finished"] += 1
        return {}

    def metrics(self):
        """The text of /metrics."""
        if self.metrics_text is not None:
            return self.metrics_text
        now = self.counters
        values = {
            "spec_decode_num_drafts_total": now["drafts"],
            "spec_decode_num_draft_tokens_total": now["draft_tokens"],
            "spec_decode_num_accepted_tokens_total": now["accepted"],
            "generation_tokens_total": now["generated"],
            "request_success_total": now["finished"],
            "num_requests_running": now["running"],
        }
        lines = [
            f"vllm:{name}{{{self.labels}}} {value}.0"
            for name, value in values.items()
            if name not in self.left_out
        ]
        if "spec_decode_num_accepted_tokens_per_pos_total" not in self.left_out:
            lines += [
                "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{{self.labels},position="{place}"}} {count}'
                for place, count in enumerate(self.by_position)
            ]
        return "\n".join([*lines, *self.extra_lines]) + "\n"

    def complete(self, body):
        """The answer to a completion request."""
        fields = self._on_complete(self, body)
        prompt = body["prompt"]
        tokens = body["max_tokens"]
        answer = {
            "choices": [
                {
                    "text": " x" * tokens,
                    "finish_reason": "length",
                    "token_ids": list(range(tokens)),
                    "logprobs": {"token_logprobs": [-0.5] * tokens},
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split()),
                "completion_tokens": tokens,
            },
        }
        return {**answer, **fields}


@contextlib.contextmanager
def serve(fake, port=0):
    """The address at which ``fake`` answers, until the end of the block."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/metrics":
                self._send(fake.metrics().encode(), "text/plain")
            elif self.path == "/v1/models":
                self._send(json.dumps({"data": [{"id": "m"}]}).encode())
            elif self.path == "/version" and fake.version:
                self._send(json.dumps({"version": fake.version}).encode())
            elif self.path == "/health":
                self._send(b"{}")
            else:
                self.send_error(404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                # A token a word.
                ids = [sum(word.encode()) for word in body["prompt"].split()]
                self._send(json.dumps({"tokens": ids}).encode())
                return
            fake.bodies.append(body)
            answer = fake.complete(body)
            if answer.get("status"):
                self.send_error(answer["status"], answer.get("words"))
            else:
                self._send(json.dumps(answer).encode())

        def _send(self, data, kind="application/json"):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            # A client that was interrupted is gone.
            with contextlib.suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
