"""What a figure shows of names, and the axes that several figures share."""

import pytest
from matplotlib.figure import Figure

from flashverify.abba import figures


def drawn(name):
    def fill(figure):
        axes = figure.subplots()
        axes.plot([0, 1], [0.5, 1.0], label=figures.label(name))
        axes.legend()
        figures.by_place(axes)

    return figures.draw(figures.label(name), (4, 3), fill)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$x", r"$\frac{$", "two\nlines", "\udcff", "日本", "x" * 999])
def test_any_name_can_be_drawn(name):
    assert drawn(name).startswith(b"\x89PNG")


def test_the_same_figure_is_the_same_bytes():
    assert drawn("a") == drawn("a") != drawn("b")


def test_a_label_is_short_and_printable():
    assert figures.label("a\x1b[2J\nb") == "a [2J b"
    assert figures.label("x" * 60) == "x" * 60
    assert figures.label("x" * 61) == "x" * 59 + "…"


def test_the_axis_of_places_has_whole_places_and_shares():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1.0, 0.5, 0.25])
    figures.by_place(axes)
    assert axes.get_ylim() == (0, 1.05)
    assert all(place == int(place) for place in axes.get_xticks())
    assert not axes.spines["top"].get_visible() and not axes.spines["right"].get_visible()
