"""abba.png: block times by slot and arm, block ratios, and errors against the floor."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from flashverify.abba import figures
from flashverify.abba.figures import COLOUR, FAINT, MARKER, NEUTRAL, tidy
from flashverify.abba.result import Measurement, Result
from flashverify.abba.text import describe_case, ratio_in_words

# The time axis ends at this many medians of the slower arm.
_TOP_MEDIANS = 3


def draw(result: Result) -> bytes:
    """The figure of a measured result, as PNG."""
    found = result.measurement
    assert found is not None

    def fill(figure: Figure) -> None:
        grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1), width_ratios=(1.25, 1))
        _draw_times(figure.add_subplot(grid[0, :]), found)
        _draw_ratios(figure.add_subplot(grid[1, 0]), found)
        _draw_errors(figure.add_subplot(grid[1, 1]), found)

    title = (
        f"{describe_case(result.options.case)}\n{result.environment['device']}, "
        f"{result.environment['threads']} threads; {figures.label(found.inputs)}"
    )
    return figures.draw(title, (11, 7.2), fill)


def _draw_times(axes: Axes, found: Measurement) -> None:
    longest_us = max(slot.latency_us for block in found.blocks for slot in block.slots)
    slowest_us = max(arm.latency_us.median for arm in found.arms.values())
    divisor, unit = (1000.0, "ms") if slowest_us >= 10_000 else (1.0, "us")
    # One call that the machine held up must not flatten all the others.
    top = min(longest_us, _TOP_MEDIANS * slowest_us) / divisor
    for name, arm in found.arms.items():
        places, times = [], []
        for block in found.blocks:
            for index, slot in enumerate(block.slots):
                if slot.arm == name:
                    places.append(4 * block.index + index)
                    times.append(slot.latency_us / divisor)
        colour, median = COLOUR[name], arm.latency_us.median / divisor
        label = f"{name}: {arm.route}, median {median:,.4g} {unit}"
        axes.plot(places, times, MARKER[name], color=colour, markersize=4.5, label=label)
        axes.axhline(median, color=colour, linewidth=1, linestyle="--")
        above = [place for place, time in zip(places, times, strict=True) if time > top]
        axes.plot(above, [1.04 * top] * len(above), "^", color=colour, markersize=6)
    for block in found.blocks:
        if block.index % 2:
            axes.axvspan(4 * block.index - 0.5, 4 * block.index + 3.5, color="#000000", alpha=0.05)
    floors_us = {"byte": found.read_gb_s.floor_us, "arithmetic": found.matmul_gflop_s.floor_us}
    kind = max(floors_us, key=lambda name: floors_us[name])
    floor = floors_us[kind] / divisor
    label = f"{kind} floor of this run, {floor:,.4g} {unit}"
    axes.axhline(floor, color=NEUTRAL, linewidth=1.2, linestyle=":", label=label)
    axes.set_xlim(-0.5, 4 * len(found.blocks) - 0.5)
    # From 0, so that heights compare; the headroom is the legend's.
    axes.set_ylim(0, 1.25 * max(top, floor))
    axes.set_title("Time of each call, in the order in which they ran")
    axes.set_xlabel(
        "slot (four to a block, A B B A; shading tells blocks apart; ^ is off the scale)"
    )
    axes.set_ylabel(f"latency ({unit})")
    axes.legend(loc="upper center", ncols=3, frameon=False)
    axes.xaxis.set_major_locator(MultipleLocator(4 * math.ceil(len(found.blocks) / 25)))
    axes.yaxis.set_major_formatter("{x:,g}")
    tidy(axes)


def _draw_ratios(axes: Axes, found: Measurement) -> None:
    ratios = [block.ratio_b_over_a() for block in found.blocks]
    axes.plot(range(len(ratios)), ratios, "D", color=NEUTRAL, markersize=4)
    axes.axhline(1, color="#000000", linewidth=0.8)
    axes.axhline(found.ratio.median, color=COLOUR["B"], linestyle="--", linewidth=1)
    if found.ratio.ci95 is not None:
        axes.axhspan(*found.ratio.ci95, color=COLOUR["B"], alpha=0.15)
    axes.set_title("Time of B over time of A, by block")
    axes.set_xlabel(ratio_in_words(found).replace(" from ", "\nfrom "))
    axes.set_ylabel("ratio B / A")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)


def _draw_errors(axes: Axes, found: Measurement) -> None:
    names, values, colours = [], [], []
    for name, arm in found.arms.items():
        names.append(f"{name}: {arm.route}")
        values.append(arm.error.relative_l2)
        colours.append(COLOUR[name])
    for name, peer in found.peers.items():
        if peer.relative_l2 is not None:
            names.append(f"peer: {name}")
            values.append(peer.relative_l2)
            colours.append(FAINT)
    shown = [value or 0.0 for value in values]
    bars = axes.barh(range(len(names)), shown, color=colours, height=0.6)
    axes.bar_label(
        bars,
        labels=["not finite" if value is None else f" {value:.3e}" for value in values],
        padding=2,
    )
    floor = found.fp16_rounding_floor
    if floor is not None:
        axes.axvline(floor, color="#000000", linewidth=1.2, linestyle="--")
        axes.set_xlabel(f"relative L2 error (dashed: rounding to FP16 alone, {floor:.3e})")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*shown, floor or 0.0]) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter("{x:.1e}")
    axes.set_title("Error against FP64")
    tidy(axes)
