"""What the figures of abba and of the tools share: their file, colours and axes."""

import io
import warnings
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Told apart by people with any colour vision, and by their markers in print.
COLOUR = {"A": "#D55E00", "B": "#0072B2"}
MARKER = {"A": "o", "B": "s"}
NEUTRAL = "#555555"
FAINT = "#999999"


def draw(title: str, size: tuple[float, float], fill: Callable[[Figure], None]) -> bytes:
    """A figure of ``size`` inches that ``fill`` draws, as PNG."""
    style = matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            # Names of models and prompts are what they are, dollar signs included.
            "text.parse_math": False,
        }
    )
    # The object interface, so that no display and no global state takes part.
    with style, warnings.catch_warnings():
        # A name in letters that the font lacks is drawn with boxes in their place.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=9.5)
        fill(figure)
        png = io.BytesIO()
        # No creation date or version: the same result gives the same file.
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def label(text: str, most: int = 60) -> str:
    """A name that a figure can show: at most so many characters, all of them printable."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def tidy(axes: Axes) -> None:
    """A faint grid behind the data, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#000000", alpha=0.08)
    axes.set_axisbelow(True)


def by_place(axes: Axes) -> None:
    """Makes the axes those of acceptance by place in the block."""
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Share of blocks whose draft was accepted")
    axes.set_xlabel("place of the draft in its block")
    tidy(axes)
