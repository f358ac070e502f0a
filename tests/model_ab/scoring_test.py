"""Distances of log-probabilities."""

import numpy as np
import pytest

from tests.acceptance.fake_server import FakeServer, serve
from tools.acceptance.exchange import ServerError
from tools.acceptance.server import Server
from tools.model_ab import scoring
from tools.model_ab.texts import Text, cut


def test_distance():
    left, right = np.array([0.0, -1.0, -2.0, -3.0]), np.array([0.0, -1.5, -2.0, -1.0])
    found = scoring.distance(left, right)
    assert found == scoring.Distance(
        mean_abs=0.625, rms=pytest.approx((4.25 / 4) ** 0.5), max_abs=2.0, identical_share=0.5
    )
    assert scoring.perplexity(left) == pytest.approx(np.exp(1.5))


def test_blocks_are_whole_and_paired():
    generator = np.random.default_rng(0)
    exact = generator.normal(size=10 * scoring.BLOCK_TOKENS + 17)
    noise = generator.normal(size=exact.shape)
    found = scoring.compare(exact + noise, exact + 3 * noise, exact, seed=0)
    assert [len(found.rms_by_block[arm]) for arm in "AB"] == [10, 10]
    # Noise that both arms share cancels in the pairs, however much it varies.
    assert found.ratio_b_over_a.median == pytest.approx(3)
    assert found.ratio_b_over_a.ci95 == pytest.approx((3, 3))
    short = scoring.compare(exact[:100] + 1, exact[:100] + 2, exact[:100], seed=0)
    assert short.ratio_b_over_a.median == pytest.approx(2)
    assert short.ratio_b_over_a.ci95 is None


def test_an_arm_without_any_distance_gives_no_ratio():
    exact = np.zeros(600)
    assert scoring.compare(exact, exact + 1, exact, 0).ratio_b_over_a is None
    assert scoring.compare(exact + 1, exact, exact, 0).ratio_b_over_a.median == 0


TEXT = Text("text", (5, 6, 7, 8), 3)


def answer(prompt_logprobs):
    choice = {"text": "", "prompt_logprobs": prompt_logprobs}
    return FakeServer(lambda _server, _body: {"choices": [choice]})


def test_a_score_is_that_of_the_texts_own_tokens():
    entries = [
        None,
        {"9": {"logprob": -0.1}, "6": {"logprob": -2.0}},
        {"7": {"logprob": -3.0}},
    ]
    fake = answer(entries)
    with serve(fake) as url:
        scores = scoring.score(Server(url), "m", TEXT, seed=4)
    assert scores.tolist() == [-2.0, -3.0]
    (body,) = fake.bodies
    assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 1 and body["seed"] == 4


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [None, {"6": {"logprob": -2.0}}],
        [None, {"1": {"logprob": -2.0}}, {"7": {"logprob": -3.0}}],
        [None, None, {"7": {"logprob": -3.0}}],
        [None, {"6": {"logprob": float("-inf")}}, {"7": {"logprob": -3.0}}],
    ],
)
def test_scores_that_lack_a_token_are_refused(entries):
    with serve(answer(entries)) as url, pytest.raises(ServerError, match="prompt_logprobs"):
        scoring.score(Server(url), "m", TEXT, seed=0)


def test_a_text_is_cut_to_the_context():
    text = cut("name", range(10), 8, 3)
    assert (text.ids, text.prompt) == (tuple(range(8)), [0, 1, 2, 3, 4])
    assert text.sha256() != cut("name", range(1, 10), 8, 3).sha256()
