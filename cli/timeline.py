"""Draw a prediction: a row for each rank, with a lane of compute and a lane of transfers.

timeline_boxes.py says what is where and in which colour. matplotlib is loaded at first use.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from longctx_patch.cli.pictures import check_picture
from longctx_patch.cli.timeline_boxes import (
    COMPUTE_STYLES,
    IDLE,
    INK,
    TRANSFER_STYLES,
    Box,
    Style,
    compute_boxes,
    idle_boxes,
    transfer_boxes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from longctx_patch.predict.attention.costs import Prediction

ENDINGS = (".png", ".svg", ".pdf")
MAX_RANKS = 64
"""More rows than this are too thin to read."""

WIDTH_INCHES = 11.0
DPI = 110
TOP_INCHES, BOTTOM_INCHES = 1.22, 0.55
LEFT, RIGHT = 0.8 / WIDTH_INCHES, 1 - 0.25 / WIDTH_INCHES
"""Edges of the rows, as shares of the picture's width."""
LABEL_POINTS = 7.0
FAINT_INK, RULE = "#5C5C5C", "#E3E3E3"


def check_drawable(path: Path, num_ranks: int) -> None:
    """Raise ValueError for a picture that `draw` could not make."""
    check_picture("--out", path, ENDINGS)
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"--out with --ranks {num_ranks}: a picture has a row for each rank, and more than "
            f"{MAX_RANKS} can't be read. Use --ranks {MAX_RANKS} or fewer, or --json without --out."
        )


def draw(prediction: "Prediction", path: Path | BinaryIO, *, caption: str) -> None:
    """Write the picture of a prediction made `with_timeline`; `caption` says what was assumed.

    A file that is open gets a PNG.
    """
    import matplotlib

    # matplotlib reads these when a figure is made, and again when it is written.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 0.7}):
        make_figure(prediction, caption).savefig(path, dpi=DPI)


def make_figure(prediction: "Prediction", caption: str) -> "Figure":
    """Make the picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    row_inches = 0.46 if prediction.ranks <= 16 else 0.30
    height = TOP_INCHES + BOTTOM_INCHES + row_inches * prediction.ranks
    edges = {"left": LEFT, "right": RIGHT, "bottom": BOTTOM_INCHES / height}
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    axes = figure.subplots(gridspec_kw=edges | {"top": 1 - TOP_INCHES / height})
    _draw_rows(axes, prediction)
    compute, transfers = compute_boxes(prediction), transfer_boxes(prediction)
    points = 72 * WIDTH_INCHES * (RIGHT - LEFT) / (1e3 * prediction.makespan_s)  # per millisecond
    idle = [gap for gap in idle_boxes(compute, prediction) if gap.width_ms * points > 4]
    _draw_boxes(axes, [*compute, *transfers, *idle], points)
    _draw_labels(axes, compute, points)
    _draw_head(figure, prediction, caption)
    _draw_legend(figure, 0.78, "compute", [*compute, *idle], (*COMPUTE_STYLES, IDLE))
    _draw_legend(figure, 0.99, "transfer", transfers, TRANSFER_STYLES.values())
    return figure


def time_text(seconds: float) -> str:
    """Write seconds with three digits, in milliseconds below a second."""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def _draw_rows(axes: "Axes", prediction: "Prediction") -> None:
    """Name the rows of ranks and the axis of time, and rule lines between them."""
    ranks = range(prediction.ranks)
    axes.set(xlim=(0, 1e3 * prediction.makespan_s), ylim=(prediction.ranks, 0), axisbelow=True)
    axes.set_yticks([rank + 0.48 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("time (ms)", fontsize=9, color=FAINT_INK)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT_INK, pad=6)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=RULE, linewidth=0.7)
    axes.hlines(range(prediction.ranks + 1), *axes.get_xlim(), color=RULE, linewidth=0.7, zorder=0)


def _draw_boxes(axes: "Axes", boxes: Iterable[Box], points: float) -> None:
    """Draw boxes as one collection, which is much faster than one by one; hatch idle boxes."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    looks = [(box, _look(box.style, wide=box.width_ms * points > 3)) for box in boxes]
    for hatch in {look.get("hatch") for _, look in looks}:
        chosen = [
            Rectangle((box.start_ms, box.top), box.width_ms, box.height, **look)
            for box, look in looks
            if look.get("hatch") == hatch
        ]
        axes.add_collection(PatchCollection(chosen, match_original=True, hatch=hatch))


def _look(style: Style, *, wide: bool = True) -> dict[str, Any]:
    """How a box is drawn. A white outline separates neighbours, but would hide a narrow box."""
    if style is IDLE:
        return {"facecolor": IDLE.colour, "edgecolor": IDLE.ink, "hatch": "/////", "linewidth": 0}
    outline = ("white", 0.7) if wide else (style.colour, 0.2)
    return {"facecolor": style.colour, "edgecolor": outline[0], "linewidth": outline[1]}


def _draw_labels(axes: "Axes", boxes: list[Box], points: float) -> None:
    """Draw long labels or short ones, whichever more boxes have room for, the same for all.

    Characters are 0.6 to 0.7 of their size wide.
    """

    def fitting(length: int) -> list[Box]:
        size = LABEL_POINTS / points
        return [b for b in boxes if size * (0.66 * len(b.labels[length]) + 0.6) <= b.width_ms]

    length = max((0, 1), key=lambda length: len(fitting(length)))
    for box in fitting(length):
        x, y = box.start_ms + box.width_ms / 2, box.top + box.height / 2
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": box.style.ink}
        axes.text(x, y, box.labels[length], fontsize=LABEL_POINTS, **look)


def _draw_head(figure: "Figure", prediction: "Prediction", caption: str) -> None:
    degree = prediction.ulysses_degree
    ring = prediction.ranks // degree
    degrees = f" (Ulysses {degree} × ring {ring})" if degree > 1 and ring > 1 else ""
    title = f"{prediction.plan}, {prediction.direction.value}, {prediction.ranks} ranks{degrees}"
    headline = (
        f"makespan {time_text(prediction.makespan_s)}   ·   "
        f"waiting {prediction.waiting_fraction:.1%} of the GPUs' time   ·   "
        f"lost to messages {time_text(prediction.exposed_communication_s)}"
    )
    first, second = _from_top(figure, 0.34), _from_top(figure, 0.58)
    figure.text(LEFT, first, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(LEFT, second, headline, fontsize=9.5, color=INK)
    figure.text(RIGHT, first, caption, fontsize=8.5, color=FAINT_INK, ha="right")


def _draw_legend(
    figure: "Figure", inches: float, lane: str, boxes: Iterable[Box], styles: Iterable[Style]
) -> None:
    """Draw a legend of the `styles` that boxes have, each once, on one line."""
    from matplotlib.patches import Patch

    used = {box.style for box in boxes}
    styles = [style for style in dict.fromkeys(styles) if style in used]
    if not styles:
        return
    figure.text(LEFT, _from_top(figure, inches + 0.03), lane, fontsize=8.5, color=FAINT_INK)
    figure.legend(
        handles=[Patch(label=style.name, **_look(style)) for style in styles],
        loc="center left",
        bbox_to_anchor=(LEFT + 0.62 / WIDTH_INCHES, _from_top(figure, inches)),
        ncols=len(styles),
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1.3,
        columnspacing=1.6,
        borderpad=0,
    )


def _from_top(figure: "Figure", inches: float) -> float:
    """The height of a line `inches` below the top, as a share of the figure's height."""
    return 1 - inches / figure.get_figheight()
