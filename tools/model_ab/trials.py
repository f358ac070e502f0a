"""The requests of a run in A B B A blocks, and what they show."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashverify.abba.stats import paired_ratio, summarise
from flashverify.abba.timing import ORDER, Block, Slot
from tools.acceptance import speculation
from tools.acceptance.measure import MEASURED, RequestResult, measure
from tools.acceptance.prompts import PromptCase
from tools.model_ab.arms import Arm
from tools.model_ab.checks import Check, failed, measured, not_run
from tools.model_ab.texts import Text


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a run; ``block`` is None for the untimed first one of each arm."""

    text: str
    arm: str
    block: int | None
    slot: int
    result: RequestResult


def send(
    arms: Mapping[str, Arm],
    texts: Sequence[Text],
    *,
    max_tokens: int,
    blocks: int,
    seed: int,
    settle_s: float,
    step: Callable[[], object],
) -> list[Request]:
    """Sends each text once to each arm untimed, then in ``blocks`` blocks of A B B A.

    The first request leaves the prompt's keys in the server's prefix cache, as it has one;
    the timed ones then show decoding and verification at the full context.
    """
    parameters = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }

    def one(text: Text, arm: str, block: int | None, slot: int) -> Request:
        case = PromptCase(text.name, text.prompt)
        found = measure(arms[arm].server, arms[arm].model, case, parameters, settle_s=settle_s)
        step()
        return Request(text.name, arm, block, slot, found)

    requests = []
    for text in texts:
        requests += [one(text, arm, None, slot) for slot, arm in enumerate(arms)]
        for block in range(blocks):
            requests += [one(text, arm, block, slot) for slot, arm in enumerate(ORDER)]
    return requests


def check_acceptance(requests: Sequence[Request]) -> Check:
    """Acceptance of each arm by text, from the requests of the blocks."""
    unmeasured = _first_unmeasured(requests)
    if unmeasured is not None:
        return not_run(unmeasured)
    found: dict[str, Any] = {}
    for text, arm, of_arm in _by_text_and_arm(_timed(requests)):
        parts = [request.result.speculation for request in of_arm]
        whole = speculation.total(part for part in parts if part is not None)
        if whole is None or None in parts:
            return not_run(f"arm {arm} counts no speculation")
        found.setdefault(text, {})[arm] = {
            **whole.to_json(),
            "source": sorted({request.result.source or "" for request in of_arm}),
            "same_in_every_request": len(set(parts)) == 1,
        }
    return measured(found)


def check_outputs(requests: Sequence[Request]) -> Check:
    """Whether the arms' tokens are the same, and each arm's own every time."""
    found: dict[str, Any] = {}
    texts: dict[str, dict[str, list[tuple[Any, Any]]]] = {}
    for request in requests:
        completion = request.result.completion
        if completion is None:
            return not_run(_words(request))
        if completion.token_ids is None:
            return not_run(f"arm {request.arm} returns no token ids")
        of_arm = texts.setdefault(request.text, {}).setdefault(request.arm, [])
        of_arm.append((completion.token_ids, completion.logprobs))
    for text, arms in texts.items():
        (ids_a, logprobs_a), (ids_b, logprobs_b) = arms["A"][0], arms["B"][0]
        pairs = list(zip(ids_a, ids_b, strict=False))
        parted = [place for place, (left, right) in enumerate(pairs) if left != right]
        first = parted[0] if parted else None
        gap = None
        if logprobs_a and logprobs_b:
            common = len(pairs) if first is None else first
            both = list(zip(logprobs_a, logprobs_b, strict=False))[:common]
            gap = max((abs(left - right) for left, right in both), default=0.0)
        found[text] = {
            "same_tokens": ids_a == ids_b,
            "tokens": len(ids_a),
            "first_difference": first,
            "max_logprob_gap_before_it": gap,
            "repeats": {
                arm: all(output == outputs[0] for output in outputs)
                for arm, outputs in arms.items()
            },
        }
    return measured(found)


def blocks_of(requests: Sequence[Request], text: str) -> list[Block]:
    """The timed blocks of a text."""
    slots: dict[int, list[Slot]] = {}
    for request in _timed(requests):
        if request.text == text and request.result.completion is not None:
            time_us = 1e6 * request.result.completion.elapsed_s
            assert request.block is not None
            slots.setdefault(request.block, []).append(Slot(request.arm, time_us))
    return [Block(index, tuple(of_block)) for index, of_block in slots.items()]


def check_latency(requests: Sequence[Request], seed: int) -> Check:
    """Time of a request under each arm, and the paired ratio over the blocks."""
    for request in requests:
        if request.result.completion is None:
            return failed(_words(request))
    found: dict[str, Any] = {}
    ratios = []
    for text in dict.fromkeys(request.text for request in requests):
        blocks = blocks_of(requests, text)
        of_text = [block.ratio_b_over_a() for block in blocks]
        ratios += of_text
        found[text] = {
            "latency_us": {
                arm: dataclasses.asdict(
                    summarise([s.latency_us for b in blocks for s in b.slots if s.arm == arm])
                )
                for arm in "AB"
            },
            "ratio_b_over_a": dataclasses.asdict(paired_ratio(of_text, seed)),
        }
    whole = paired_ratio(ratios, seed)
    return measured({"texts": found, "ratio_b_over_a": dataclasses.asdict(whole)})


def _timed(requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.block is not None]


def _by_text_and_arm(requests: Sequence[Request]) -> list[tuple[str, str, list[Request]]]:
    keys = sorted({(request.text, request.arm) for request in requests})
    return [
        (text, arm, [r for r in requests if (r.text, r.arm) == (text, arm)]) for text, arm in keys
    ]


def _first_unmeasured(requests: Sequence[Request]) -> str | None:
    for request in _timed(requests):
        if request.result.status != MEASURED:
            return _words(request)
    return None


def _words(request: Request) -> str:
    return (
        f"arm {request.arm}, text {request.text}: {request.result.status}: {request.result.reason}"
    )
