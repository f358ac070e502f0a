"""Attribution: what one request is given of what the server counted."""

import pytest

from tests.acceptance.fake_server import FakeServer, serve
from tools.acceptance.exchange import ServerError
from tools.acceptance.measure import measure
from tools.acceptance.prompts import PromptCase
from tools.acceptance.server import Server
from tools.acceptance.speculation import Speculation, total

CASE = PromptCase("case", "a b c")
OWN = Speculation(drafts=2, draft_tokens=6, accepted=3, accepted_by_position=(2, 1, 0))


def run(fake, case=CASE, settle_s=0.3):
    with serve(fake) as url:
        return measure(Server(url), "m", case, {"max_tokens": 5}, settle_s=settle_s)


def test_a_request_alone():
    fake = FakeServer()
    fake.counters.update(drafts=100, draft_tokens=300, accepted=50, generated=999, finished=7)
    found = run(fake)
    assert (found.status, found.reason, found.source) == ("measured", None, "counters")
    assert found.speculation == OWN
    assert found.speculation.rate == 0.5 and found.speculation.mean_length == 2.5
    assert found.speculation.rate_by_position == (1.0, 0.5, 0.0)
    assert (found.completion.prompt_tokens, found.completion.completion_tokens) == (3, 5)
    assert found.tokens_per_second == 5 / found.completion.elapsed_s
    assert fake.bodies == [{"model": "m", "prompt": "a b c", "stream": False, "max_tokens": 5}]


def test_a_cases_own_parameters_win_and_token_ids_pass():
    fake = FakeServer()
    found = run(fake, PromptCase("case", [1, 2], {"max_tokens": 9, "seed": 4}))
    assert fake.bodies == [
        {"model": "m", "prompt": [1, 2], "stream": False, "max_tokens": 9, "seed": 4}
    ]
    assert found.completion.completion_tokens == 9 and found.status == "measured"


def test_counters_that_come_late_are_waited_for():
    fake = FakeServer(lambda _server, _body: {})
    asked = []

    def late():
        asked.append(1)
        if len(asked) == 4:
            fake.count({"max_tokens": 5})
        return ""

    plain = fake.metrics
    fake.metrics = lambda: late() + plain()
    assert run(fake, settle_s=5).speculation == OWN
    assert len(asked) >= 4


def test_a_busy_server_is_sent_nothing():
    fake = FakeServer()
    fake.counters["running"] = 2
    found = run(fake)
    assert (found.status, found.reason) == ("not run", "2 other requests are in flight")
    assert fake.bodies == []


def during(change):
    """A server that does more during a request than the request."""

    def on_complete(server, body):
        server.count(body)
        change(server)
        return {}

    return FakeServer(on_complete)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.count({"max_tokens": 3}), "2 requests finished meanwhile"),
        (lambda s: s.counters.update(running=1), "1 other requests are in flight"),
        (
            lambda s: s.counters.update(generated=8),
            "8 tokens were generated meanwhile, 5 of them for this request",
        ),
        (
            lambda s: s.counters.update(drafts=1),
            "the server was started anew: spec_decode_num_drafts_total{'engine': '0', "
            "'model_name': 'm'} fell from 40 to 1",
        ),
    ],
)
def test_what_may_be_of_others_is_not_attributed(change, reason):
    fake = during(change)
    fake.counters["drafts"] = 40
    found = run(fake)
    assert (found.status, found.reason) == ("not attributed", reason)
    assert found.speculation is None and found.completion.completion_tokens == 5


def test_without_any_sign_of_others_nothing_is_attributed():
    fake = FakeServer()
    fake.left_out = ("request_success_total", "num_requests_running")
    found = run(fake)
    assert found.status == "not attributed" and "neither" in found.reason
    fake = FakeServer()
    fake.left_out = ("request_success_total",)
    assert run(fake).speculation == OWN


def test_a_server_without_speculation():
    fake = FakeServer()
    fake.left_out = ("spec_decode_num_drafts_total",)
    found = run(fake)
    assert (found.status, found.speculation, found.source) == ("measured", None, None)
    fake = FakeServer()
    fake.left_out = ("spec_decode_num_accepted_tokens_per_pos_total",)
    assert run(fake).speculation == Speculation(2, 6, 3, None)


RESPONSE = {
    "metrics": {
        "time_to_first_token_ms": 1.5,
        "speculative_decoding": {
            "acceptance_histogram": [1, 1, 2, 0],
            "num_spec_steps": 4,
            "num_draft_tokens": 12,
            "num_accepted_draft_tokens": 5,
        },
    }
}


def test_metrics_in_the_answer_are_its_own():
    """They hold where counters cannot be attributed, and a contradiction is told."""
    of_answer = Speculation(4, 12, 5, (3, 2, 0))

    def exact(server, body):
        server.count(body, drafts=4, accepted=(3, 2, 0))
        return RESPONSE

    found = run(FakeServer(exact))
    assert (found.status, found.source, found.notes) == ("measured", "response", ())
    assert found.speculation == of_answer

    def shared(server, body):
        server.count(body)
        server.count(body)
        return RESPONSE

    found = run(FakeServer(shared))
    assert (found.status, found.speculation) == ("measured", of_answer)

    def other(server, body):
        server.count(body)
        return RESPONSE

    (note,) = run(FakeServer(other)).notes
    assert note.startswith("the server's counters say otherwise: {'drafts': 2,")


def test_metrics_in_the_answer_that_make_no_sense_are_left():
    broken = {"metrics": {"speculative_decoding": {"num_spec_steps": 4}}}
    found = run(FakeServer(lambda server, body: server.count(body) | broken))
    assert (found.source, found.speculation) == ("counters", OWN)


def test_an_error_of_the_server_is_a_failed_request():
    found = run(FakeServer(lambda _server, _body: {"status": 500, "words": "out of pages"}))
    assert found.status == "failed"
    assert "HTTP 500" in found.reason and "out of pages" in found.reason
    found = run(FakeServer(lambda _server, _body: {"usage": None}))
    assert found.status == "failed" and "no choice with text and usage" in found.reason


def test_a_server_that_is_not_there():
    with serve(FakeServer()) as url:
        pass
    found = measure(Server(url), "m", CASE, {}, settle_s=0)
    assert found.status == "not run" and "refused" in found.reason
    for wrong in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(ServerError, match="no address of a server"):
            Server(wrong)


def test_a_text_that_is_no_metrics():
    fake = FakeServer()
    fake.metrics_text = "<html>\n"
    found = run(fake)
    assert found.status == "not run" and "not in the Prometheus text format" in found.reason


def test_totals():
    other = Speculation(1, 3, 3, (1, 1, 1, 5))
    assert total([OWN, other]) == Speculation(3, 9, 6, (3, 2, 1, 5))
    assert total([OWN, Speculation(1, 3, 3, None)]) == Speculation(3, 9, 6, None)
    assert total([]) is None
    nothing = Speculation(0, 0, 0, (0, 0, 0))
    assert (nothing.rate, nothing.mean_length, nothing.rate_by_position) == (None, None, None)
