"""The side by side as a page."""

from __future__ import annotations

from typing import Any


def markdown(data: dict[str, Any]) -> str:
    """The page of what side_by_side.json holds."""
    about, results = data["about"], data["results"]
    lines = [
        "# flashverify beside vLLM's own CPU attention",
        "",
        f"{about['shape']}; vLLM {about['vllm']}, {about['device']}. Medians of calls in A B B A "
        "blocks of one run; the interval is of 95 %.",
        "",
        "| keys | q | vLLM us | flashverify us | speed-up | interval |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for one in results:
        theirs, ours = one["arms"]["A"], one["arms"]["B"]
        ratio = one["ours_over_theirs"]
        interval = "-"
        if ratio["ci95"]:
            low, high = (1 / bound for bound in reversed(ratio["ci95"]))
            interval = f"{low:.2f} to {high:.2f}"
        lines.append(
            f"| {one['context']:,} | {one['q_len']} | {theirs['latency_us']['median']:,.0f} "
            f"| {ours['latency_us']['median']:,.0f} | {1 / ratio['median']:.2f} | {interval} |"
        )
    lines += [
        "",
        "Error against FP64: relative L2 of the worst row, beside that of rounding the exact "
        "output to bfloat16. One thread: the same bits as with all. Row by row: each row alone "
        "(q 1) has the bits that it has in the block; in brackets the largest difference.",
        "",
        "| keys | q | bfloat16 | vLLM | flashverify | one thread: vLLM | flashverify "
        "| row by row: vLLM | flashverify |",
        "|---:|---:|---:|---:|---:|---|---|---|---|",
    ]
    for one in results:
        arms = [one["arms"][name] for name in ("A", "B")]
        errors = " | ".join(_error(arm["max_row_relative_l2"]) for arm in arms)
        threads = " | ".join("same" if arm["same_with_one_thread"] else "other" for arm in arms)
        rows = " | ".join(
            "same" if arm["same_row_by_row"] else f"other ({arm['row_by_row_max_abs']:.1e})"
            for arm in arms
        )
        lines.append(
            f"| {one['context']:,} | {one['q_len']} | {_error(one['rounding_floor'])} | {errors} "
            f"| {threads} | {rows} |"
        )
    lines += ["", f"`{about['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "command"]
    return "\n".join(lines) + "\n"


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"
