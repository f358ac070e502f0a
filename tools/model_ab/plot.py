"""model_ab.png: latency of each request, log-probability distance, acceptance by place."""

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashverify.abba import figures
from flashverify.abba.figures import COLOUR, MARKER
from tools.model_ab.result import Result
from tools.model_ab.trials import blocks_of

_LINES = ("-", "--", ":", "-.")


def draw(result: Result) -> bytes:
    """The figure of a result with requests, as PNG; what was not measured stays empty."""

    def fill(figure: Figure) -> None:
        latency, distance, acceptance = figure.subplots(1, 3)
        _draw_latency(latency, result)
        _draw_distance(distance, result)
        _draw_acceptance(acceptance, result)

    names = " against ".join(
        f"{arm}: {result.options.urls[arm] or route}"
        for arm, route in (("A", result.options.arm_a), ("B", result.options.arm_b))
    )
    title = figures.label(f"{names}; {result.environment['device']}", most=150)
    return figures.draw(title, (13, 4.4), fill)


def _draw_latency(axes: Axes, result: Result) -> None:
    start = 0
    for text in result.texts:
        blocks = blocks_of(result.requests, text.name)
        if not blocks:
            continue
        for arm in "AB":
            slots = {
                start + 4 * block.index + place: slot
                for block in blocks
                for place, slot in enumerate(block.slots)
                if slot.arm == arm
            }
            seconds = [slot.latency_us / 1e6 for slot in slots.values()]
            label = arm if start == 0 else None
            axes.plot(list(slots), seconds, MARKER[arm], color=COLOUR[arm], label=label)
        name = figures.label(text.name, most=30)
        axes.annotate(name, (start, 0.03), xycoords=("data", "axes fraction"), fontsize=8)
        start += 4 * len(blocks)
        axes.axvline(start - 0.5, color="#000000", linewidth=0.5)
    if axes.lines:
        axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_title("Time of each request, in order")
    axes.set_xlabel("slot (four to a block, A B B A)")
    axes.set_ylabel("seconds")
    figures.tidy(axes)


def _draw_distance(axes: Axes, result: Result) -> None:
    found = result.checks["logprob_distance"].found or {}
    lines = itertools.cycle(_LINES)
    drawn: list[float] = []
    for text, of_text in found.items():
        for reference, compared in of_text["references"].items():
            line = next(lines)
            for arm in "AB":
                rms = compared["rms_by_block"][arm]
                drawn += rms
                label = f"{arm}, {figures.label(text, most=30)}, to {reference}"
                axes.plot(rms, line, color=COLOUR[arm], linewidth=1, label=label)
    if drawn:
        axes.legend(frameon=False, fontsize=7)
    # Arms without any distance have nothing to show on a logarithm's axis.
    if any(value > 0 for value in drawn):
        axes.set_yscale("log")
    axes.set_title("Log-probability distance")
    axes.set_xlabel("block of 256 tokens of the text")
    axes.set_ylabel("root mean square")
    figures.tidy(axes)


def _draw_acceptance(axes: Axes, result: Result) -> None:
    found = result.checks["acceptance"].found or {}
    for line, (text, arms) in zip(itertools.cycle(_LINES), found.items(), strict=False):
        for arm, of_arm in arms.items():
            rates = of_arm["rate_by_position"]
            if rates:
                style = MARKER[arm] + line
                label = f"{arm}, {figures.label(text, most=30)}"
                axes.plot(rates, style, color=COLOUR[arm], markersize=4, label=label)
    if axes.lines:
        axes.legend(frameon=False, fontsize=7)
    figures.by_place(axes)
