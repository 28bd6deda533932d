"""How our pictures look, and how one comes into a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asyncmaml.checkpoint import write_atomically
from asyncmaml.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people of every colour vision can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BEFORE, AFTER = "#8C8C8C", "#0072B2"
# After 0, 1, 2, ... gradient steps: grey, then darker and darker.
STEP_COLORS = ("#9A9A9A", "#56B4E9", "#0072B2", "#0B2F5C", "#000000")
INK, GRID = "#222222", "#E3E3E3"

_SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "pdf.fonttype": 42,  # letters that can be selected, and edited, in a paper
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
}
_DOTS_PER_INCH = 200


@contextmanager
def new_figure(width: float, height: float, path: Path) -> "Iterator[Figure]":
    """Yield an empty figure in our style, and write it to `path` at the end of the block.

    Args:
        width: In inches.
        height: In inches.
        path: The ending decides what is written: png, pdf or svg.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigurationError: matplotlib does not know the ending.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        who = "drawing"
        raise MissingExtraError.naming(who, "matplotlib", "asyncmaml[plot]") from error
    with matplotlib.rc_context(cast(Any, _SETTINGS)):
        figure = Figure(figsize=(width, height), layout="constrained")
        kinds = FigureCanvasAgg(figure).get_supported_filetypes()
        kind = path.suffix.removeprefix(".").lower()
        if kind not in kinds:
            message = f"cannot draw {path}: its ending must be one of {', '.join(sorted(kinds))}"
            raise ConfigurationError(message)
        yield figure
        write_atomically(path, lambda new: figure.savefig(new, format=kind, dpi=_DOTS_PER_INCH))
