"""model_ab.png: latency of each request, log-probability distance, acceptance by place."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flashverify.abba.plot import COLOUR
from tools.model_ab.result import Result
from tools.model_ab.trials import blocks_of

_MARKER = {"A": "o", "B": "s"}
_LINES = ("-", "--", ":", "-.")


def draw(result: Result) -> bytes:
    """The figure of a result with requests, as PNG; what was not measured stays empty."""
    # The object interface, so that no display and no global state takes part.
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(13, 4.4), dpi=120, layout="constrained")
        names = " against ".join(
            f"{arm}: {result.options.urls[arm] or route}"
            for arm, route in (("A", result.options.arm_a), ("B", result.options.arm_b))
        )
        figure.suptitle(f"{names}; {result.environment['device']}", fontsize=9.5)
        latency, distance, acceptance = figure.subplots(1, 3)
        _draw_latency(latency, result)
        _draw_distance(distance, result)
        _draw_acceptance(acceptance, result)
        png = io.BytesIO()
        # No creation date or version: the same result gives the same file.
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _draw_latency(axes: Axes, result: Result) -> None:
    start = 0
    for text in result.texts:
        blocks = blocks_of(result.requests, text.name)
        for arm in "AB":
            points = [
                (start + 4 * block.index + place, slot.latency_us / 1e6)
                for block in blocks
                for place, slot in enumerate(block.slots)
                if slot.arm == arm
            ]
            label = arm if start == 0 else None
            axes.plot(*zip(*points, strict=True), _MARKER[arm], color=COLOUR[arm], label=label)
        axes.annotate(text.name, (start, 0.03), xycoords=("data", "axes fraction"), fontsize=8)
        start += 4 * len(blocks)
        axes.axvline(start - 0.5, color="#000000", linewidth=0.5)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_title("Time of each request, in order")
    axes.set_xlabel("slot (four to a block, A B B A)")
    axes.set_ylabel("seconds")
    _tidy(axes)


def _draw_distance(axes: Axes, result: Result) -> None:
    found = result.checks["logprob_distance"].found or {}
    lines = iter(_LINES * 8)
    drawn: list[float] = []
    for text, of_text in found.items():
        for reference, compared in of_text["references"].items():
            line = next(lines)
            for arm in "AB":
                rms = compared["rms_by_block"][arm]
                drawn += rms
                label = f"{arm}, {text}, to {reference}"
                axes.plot(rms, line, color=COLOUR[arm], linewidth=1, label=label)
    if drawn:
        axes.legend(frameon=False, fontsize=7)
    # Arms without any distance have nothing to show on a logarithm's axis.
    if any(value > 0 for value in drawn):
        axes.set_yscale("log")
    axes.set_title("Log-probability distance")
    axes.set_xlabel("block of 256 tokens of the text")
    axes.set_ylabel("root mean square")
    _tidy(axes)


def _draw_acceptance(axes: Axes, result: Result) -> None:
    found = result.checks["acceptance"].found or {}
    for line, (text, arms) in zip(_LINES * 8, found.items(), strict=False):
        for arm, of_arm in arms.items():
            rates = of_arm["rate_by_position"]
            if rates:
                style = _MARKER[arm] + line
                axes.plot(rates, style, color=COLOUR[arm], markersize=4, label=f"{arm}, {text}")
    if axes.lines:
        axes.legend(frameon=False, fontsize=7)
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Share of blocks whose draft was accepted")
    axes.set_xlabel("place of the draft in its block")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#000000", alpha=0.08)
    axes.set_axisbelow(True)
