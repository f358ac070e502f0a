"""A result in words and tables, for the terminal and for model_ab.md."""

from collections.abc import Mapping
from typing import Any

from flashverify.abba.text import markdown_table, microseconds, plain_table
from tools.model_ab.result import Result

# A title, a table's header and rows, and what there is to say below it.
_Section = tuple[str, list[str], list[list[str]], list[str]]


def for_terminal(result: Result) -> str:
    """The result as it is printed."""
    lines = [*_head(result), ""]
    for title, header, rows, notes in _sections(result):
        lines += [f"{title}", *plain_table(header, rows), *notes, ""]
    return "\n".join(lines).rstrip()


def for_markdown(result: Result) -> str:
    """The contents of model_ab.md."""
    lines = ["# Model A/B", "", *(f"- {line}" for line in _head(result)), ""]
    for title, header, rows, notes in _sections(result):
        lines += [f"## {title}", "", *markdown_table(header, rows), ""]
        lines += [*(f"- {note}" for note in notes), ""]
    lines += ["![latency, distance and acceptance](model_ab.png)", ""] if result.requests else []
    lines += ["## Environment", ""]
    lines += [f"- {name}: {value}" for name, value in result.environment.items()]
    for name, server in result.servers.items():
        lines.append(f"- arm {name}: {', '.join(f'{k} {v}' for k, v in server.items())}")
    for text in result.texts:
        lines.append(
            f"- text {text.name}: {len(text.ids)} tokens, {text.prompt_tokens} of them the "
            f"prompt, SHA-256 of the token ids {text.sha256()}"
        )
    native = result.checks["native_digests"].found
    if native:
        lines += [
            f"- arm {name}: {', '.join(f'{key} {value}' for key, value in told.items())}"
            for name, told in native["flashverify"].items()
        ]
    lines += [f"- command: `{result.options.command}`", ""]
    return "\n".join(lines)


def _head(result: Result) -> list[str]:
    settings = result.settings
    return [
        f"A: {_arm(result, 'A')}; B: {_arm(result, 'B')}",
        f"on {result.environment['device']}; flashverify {result.environment['flashverify']}, "
        f"precision revision {result.environment['precision_revision']}",
        f"{settings['kv_cache_dtype']} cache, {settings['context']} tokens of context, "
        f"{settings['speculative_tokens']} drafts, {settings['max_tokens']} tokens generated, "
        f"{settings['blocks']} A B B A blocks a text",
        f"status: {result.status}",
    ]


def _arm(result: Result, name: str) -> str:
    url = result.options.urls[name]
    if url is not None:
        return url
    return result.options.arm_a if name == "A" else result.options.arm_b


def _sections(result: Result) -> list[_Section]:
    rows = [[name, check.status] for name, check in result.checks.items()]
    notes = [
        f"{name}: {check.reason or _in_short(name, check.found)}"
        for name, check in result.checks.items()
    ]
    sections: list[_Section] = [("Checks", ["check", "ended"], rows, notes)]
    for name, section in (
        ("outputs", _outputs),
        ("acceptance", _acceptance),
        ("latency", _latency),
        ("logprob_distance", _distances),
    ):
        if result.checks[name].found:
            sections.append(section(result.checks[name].found))
    return sections


def _in_short(name: str, found: Any) -> str:
    if name == "start_up":
        return "both servers answer"
    if name == "routes":
        return "; ".join(f"{arm}: {', '.join(routes)}" for arm, routes in found.items())
    if name == "native_digests":
        return f"the same {len(found['files'])} native files in both servers"
    if name == "outputs":
        same = sum(text["same_tokens"] for text in found.values())
        return f"the same tokens in {same} of {len(found)} texts"
    if name == "latency":
        return f"B / A = {_ratio(found['ratio_b_over_a'])}"
    if name == "acceptance":
        return "; ".join(
            f"{text}: mean length A {_number(arms['A']['mean_length'])}, "
            f"B {_number(arms['B']['mean_length'])}"
            for text, arms in found.items()
        )
    return "; ".join(
        f"{text}: B / A = {_ratio(compared['ratio_b_over_a'])} from {reference}"
        for text, of_text in found.items()
        for reference, compared in of_text["references"].items()
    )


def _outputs(found: Mapping[str, Any]) -> _Section:
    rows = [
        [
            text,
            "yes" if of_text["same_tokens"] else "no",
            str(of_text["tokens"]),
            "-" if of_text["first_difference"] is None else str(of_text["first_difference"]),
            _number(of_text["max_logprob_gap_before_it"], ".3e"),
            *("yes" if of_text["repeats"][arm] else "no" for arm in "AB"),
        ]
        for text, of_text in found.items()
    ]
    header = [
        "text", "same tokens", "of", "first difference", "max logprob gap", "A repeats",
        "B repeats",
    ]  # fmt: skip
    notes = ["the gap is between the arms' log-probabilities of the tokens before they differ"]
    return "Outputs", header, rows, notes


def _acceptance(found: Mapping[str, Any]) -> _Section:
    rows = []
    for text, arms in found.items():
        for arm, of_arm in arms.items():
            counts = [str(of_arm[key]) for key in ("drafts", "draft_tokens", "accepted")]
            rows.append(
                [text, arm, *counts, _number(of_arm["rate"]), _number(of_arm["mean_length"])]
            )
    header = ["text", "arm", "drafts", "drafted", "accepted", "rate", "mean length"]
    notes = ["over the timed requests; mean length counts the target's own token"]
    return "Acceptance", header, rows, notes


def _latency(found: Mapping[str, Any]) -> _Section:
    rows = []
    for text, of_text in found["texts"].items():
        for arm, latency in of_text["latency_us"].items():
            times = [microseconds(latency[key] / 1000) for key in ("median", "mad", "p10", "p90")]
            rows.append([text, arm, *times])
    header = ["text", "arm", "median ms", "MAD ms", "p10 ms", "p90 ms"]
    notes = [
        f"{text}: B / A = {_ratio(of_text['ratio_b_over_a'])}"
        for text, of_text in found["texts"].items()
    ]
    notes.append(f"all: B / A = {_ratio(found['ratio_b_over_a'])}, from paired A B B A blocks")
    notes.append("from request to answer, the prompt's keys in the prefix cache")
    return "Latency", header, rows, notes


def _distances(found: Mapping[str, Any]) -> _Section:
    rows, notes = [], []

    def row(text: str, what: str, perplexity: float | None, gap: Mapping[str, float]) -> list[str]:
        numbers = [_number(gap[key], ".3e") for key in ("mean_abs", "rms", "max_abs")]
        share = _number(gap["identical_share"])
        return [text, what, _number(perplexity, ".6f"), *numbers, share]

    for text, of_text in found.items():
        perplexities = of_text["perplexity"]
        rows.append(row(text, "A to B", None, of_text["between_arms"]))
        for reference, compared in of_text["references"].items():
            rows.append(row(text, f"A to {reference}", perplexities["A"], compared["a"]))
            rows.append(row(text, f"B to {reference}", perplexities["B"], compared["b"]))
            notes.append(
                f"{text}: perplexity of {reference} {perplexities[reference]:.6f}; root mean "
                f"square distance B / A = {_ratio(compared['ratio_b_over_a'])}"
            )
    header = ["text", "distance", "perplexity", "mean", "rms", "max", "identical"]
    notes.append("of the log-probabilities of the text's own tokens, the same for every arm")
    return "Log-probabilities", header, rows, notes


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none (an arm has no distance)"
    if found["ci95"] is None:
        return f"{found['median']:.4f} (one block gives no interval)"
    low, high = found["ci95"]
    return f"{found['median']:.4f}, 95 % interval [{low:.4f}, {high:.4f}]"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
