"""Log-probabilities of a given text under each arm, and how far they lie apart.

Every arm is given the same tokens, so that what differs is its arithmetic alone: two
generated texts that part at one token would say nothing of what follows it.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from flashverify.abba.stats import Ratio, paired_ratio
from tools.acceptance.exchange import ServerError
from tools.acceptance.server import Server
from tools.model_ab.texts import Text

# Tokens of a block: the unit that the bootstrap resamples, since neighbours are not independent.
BLOCK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Distance:
    """Differences of log-probabilities (natural logarithm) of the same tokens."""

    mean_abs: float
    rms: float
    max_abs: float
    identical_share: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both arms against a reference.

    ``ratio_b_over_a`` is of the root mean squares of blocks of BLOCK_TOKENS tokens; None
    where an arm has no distance in some block.
    """

    a: Distance
    b: Distance
    ratio_b_over_a: Ratio | None
    rms_by_block: dict[str, list[float]]


def score(server: Server, model: str, text: Text, seed: int) -> np.ndarray:
    """Log-probability of each token of a text but the first and the last, float64.

    Raises ServerError.
    """
    # A token less: the server wants room to generate one.
    ids = list(text.ids[:-1])
    found = server.complete(
        model, ids, max_tokens=1, temperature=0.0, seed=seed, prompt_logprobs=0
    ).prompt_logprobs
    if not isinstance(found, list) or len(found) != len(ids):
        raise ServerError(f"{server.url}: the answer has no prompt_logprobs for each token")
    try:
        pairs = zip(ids[1:], found[1:], strict=True)
        values = [float((entry or {})[str(token)]["logprob"]) for token, entry in pairs]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServerError(f"{server.url}: prompt_logprobs lacks a token: {error}") from error
    scored = np.asarray(values, dtype=np.float64)
    if not np.isfinite(scored).all():
        raise ServerError(f"{server.url}: prompt_logprobs holds values that are not finite")
    return scored


def distance(left: np.ndarray, right: np.ndarray) -> Distance:
    """How far two scores of one text lie apart."""
    gaps = np.abs(left - right)
    return Distance(
        mean_abs=float(gaps.mean()),
        rms=_rms(gaps),
        max_abs=float(gaps.max()),
        identical_share=float((gaps == 0).mean()),
    )


def compare(a: np.ndarray, b: np.ndarray, reference: np.ndarray, seed: int) -> Comparison:
    """Both arms' distances from a reference, and the paired ratio of the two."""
    blocks = {
        name: [_rms(scores - exact) for scores, exact in _blocks(arm, reference)]
        for name, arm in (("A", a), ("B", b))
    }
    pairs = list(zip(blocks["A"], blocks["B"], strict=True))
    ratio = None
    if all(of_a > 0 for of_a, _ in pairs):
        ratio = paired_ratio([of_b / of_a for of_a, of_b in pairs], seed)
    return Comparison(distance(a, reference), distance(b, reference), ratio, blocks)


def perplexity(scores: np.ndarray) -> float:
    """Exp of the mean negative log-probability."""
    return math.exp(-float(scores.mean()))


def _blocks(arm: np.ndarray, reference: np.ndarray) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    starts = range(0, max(len(arm) - BLOCK_TOKENS, 0) + 1, BLOCK_TOKENS)
    return [(arm[s : s + BLOCK_TOKENS], reference[s : s + BLOCK_TOKENS]) for s in starts]


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
