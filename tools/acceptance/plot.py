"""acceptance.png: mean length of each request, and acceptance by place in the block."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashverify.abba import figures
from tools.acceptance.result import Result

_COLOUR = figures.COLOUR["B"]


def draw(result: Result) -> bytes:
    """The figure of a result whose speculation was measured, as PNG."""

    def fill(figure: Figure) -> None:
        lengths, places = figure.subplots(1, 2, width_ratios=(1.2, 1))
        _draw_lengths(lengths, result)
        _draw_places(places, result)

    title = figures.label(f"{result.environment['model']} at {result.environment['url']}", most=120)
    return figures.draw(title, (11, 4.2), fill)


def _draw_lengths(axes: Axes, result: Result) -> None:
    shown = [r for r in result.measured if r.speculation and r.speculation.mean_length]
    names = [figures.label(request.name, most=40) for request in shown]
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
    figures.tidy(axes)


def _draw_places(axes: Axes, result: Result) -> None:
    for request in result.measured:
        rates = request.speculation.rate_by_position if request.speculation else None
        if rates:
            axes.plot(range(len(rates)), rates, color=figures.FAINT, linewidth=0.8)
    total = result.speculation
    rates = total.rate_by_position if total else None
    if rates:
        label = f"all {len(result.measured)} requests"
        axes.plot(range(len(rates)), rates, "o-", color=_COLOUR, markersize=5, label=label)
        axes.legend(frameon=False)
    figures.by_place(axes)
