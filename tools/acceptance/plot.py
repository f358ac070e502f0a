"""acceptance.png: mean length of each request, and acceptance by place in the block."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.acceptance.result import Result

_COLOUR = "#0072B2"
_NEUTRAL = "#999999"


def draw(result: Result) -> bytes:
    """The figure of a result whose speculation was measured, as PNG."""
    total = result.speculation
    assert total is not None
    # The object interface, so that no display and no global state takes part.
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
        figure.suptitle(
            f"{result.environment['model']} at {result.environment['url']}", fontsize=9.5
        )
        lengths, places = figure.subplots(1, 2, width_ratios=(1.2, 1))
        _draw_lengths(lengths, result)
        _draw_places(places, result)
        png = io.BytesIO()
        # No creation date or version: the same result gives the same file.
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _draw_lengths(axes: Axes, result: Result) -> None:
    shown = [r for r in result.measured if r.speculation and r.speculation.mean_length]
    names = [request.name for request in shown]
    values = [r.speculation.mean_length or 0.0 for r in shown if r.speculation]
    bars = axes.barh(range(len(shown)), values, color=_COLOUR, height=0.6)
    rates = [f" {r.tokens_per_second or 0:.1f} tokens/s" for r in shown]
    axes.bar_label(bars, labels=rates, padding=2, fontsize=8)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*values, 1.0]))
    axes.axvline(1, color="#000000", linewidth=0.8)
    axes.set_title("Tokens that a block yields, by request")
    axes.set_xlabel("mean length (1: every draft was rejected)")
    _tidy(axes)


def _draw_places(axes: Axes, result: Result) -> None:
    for request in result.measured:
        rates = request.speculation.rate_by_position if request.speculation else None
        if rates:
            axes.plot(range(len(rates)), rates, color=_NEUTRAL, linewidth=0.8)
    total = result.speculation
    rates = total.rate_by_position if total else None
    if rates:
        label = f"all {len(result.measured)} requests"
        axes.plot(range(len(rates)), rates, "o-", color=_COLOUR, markersize=5, label=label)
        axes.legend(frameon=False)
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Share of blocks whose draft was accepted")
    axes.set_xlabel("place of the draft in its block")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#000000", alpha=0.08)
    axes.set_axisbelow(True)
