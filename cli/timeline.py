"""Draw a prediction: a row for each rank, with a lane of compute and a lane of transfers.

timeline_boxes.py says what is where and in which colour. matplotlib is loaded at first use.
"""

from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
LEFT_INCHES, RIGHT_INCHES, TOP_INCHES, BOTTOM_INCHES = 0.8, 0.25, 1.22, 0.55
LABEL_POINTS = 7.0
FAINT_INK, RULE = "#5C5C5C", "#E3E3E3"


def check_drawable(path: Path, num_ranks: int) -> None:
    """Raise ValueError for a picture that `draw` could not make."""
    if path.suffix.lower() not in ENDINGS:
        stem = "schedule" if path.stem in ("", *ENDINGS) else path.stem
        png = path.parent / f"{stem}.png"
        raise ValueError(
            f"--out {str(path)!r}: the ending chooses the format, one of {', '.join(ENDINGS)}. "
            f"Use --out {str(png)!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--out {str(path)!r}: there is no folder {str(path.parent)!r}, and none is made. "
            "Make it first, or give another folder."
        )
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"--out with --ranks {num_ranks}: a picture has a row for each rank, and more than "
            f"{MAX_RANKS} can't be read. Use --ranks {MAX_RANKS} or fewer, or --json without --out."
        )
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"--out {str(path)!r}: pictures are drawn with matplotlib, which is not installed. "
            "Run: pip install longctx-patch[draw]"
        )


def draw(prediction: "Prediction", path: Path, *, caption: str) -> None:
    """Write the picture of a prediction made `with_timeline`; `caption` says what was assumed."""
    import matplotlib

    # Read when a figure is made and again when it is written.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 0.7}):
        make_figure(prediction, caption).savefig(path, dpi=DPI)


def make_figure(prediction: "Prediction", caption: str) -> "Figure":
    """Make the picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    row_inches = 0.46 if prediction.ranks <= 16 else 0.30
    height = TOP_INCHES + BOTTOM_INCHES + row_inches * prediction.ranks
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    axes = _add_axes(figure, prediction)
    compute, transfers = compute_boxes(prediction), transfer_boxes(prediction)
    gaps = idle_boxes(compute, prediction)
    idle = [gap for gap in gaps if _points(axes, gap.width_ms) > 4]
    for boxes in (compute, transfers, idle):
        _draw_boxes(axes, boxes)
    _draw_labels(axes, compute)
    _draw_head(figure, prediction, caption)
    _draw_legend(figure, 0.78, "compute", [*compute, *idle], (*COMPUTE_STYLES, IDLE))
    _draw_legend(figure, 0.99, "transfer", transfers, TRANSFER_STYLES.values())
    return figure


def headline(prediction: "Prediction") -> str:
    """Makespan and waiting, for the picture."""
    return (
        f"makespan {time_text(prediction.makespan_s)}   ·   "
        f"waiting {prediction.waiting_fraction:.1%} of the GPUs' time   ·   "
        f"lost to messages {time_text(prediction.exposed_communication_s)}"
    )


def time_text(seconds: float) -> str:
    """Write seconds with three digits, in milliseconds below a second."""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def _add_axes(figure: "Figure", prediction: "Prediction") -> "Axes":
    left, bottom = _place(figure, LEFT_INCHES, figure.get_figheight() - BOTTOM_INCHES)
    right, top = _place(figure, WIDTH_INCHES - RIGHT_INCHES, TOP_INCHES)
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    ranks = range(prediction.ranks)
    axes.set_xlim(0, 1e3 * prediction.makespan_s)
    axes.set_ylim(prediction.ranks, 0)
    axes.set_yticks([rank + 0.48 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("time (ms)", fontsize=9, color=FAINT_INK)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT_INK, pad=6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=RULE, linewidth=0.7)
    axes.hlines(range(prediction.ranks + 1), *axes.get_xlim(), color=RULE, linewidth=0.7, zorder=0)
    return axes


def _draw_boxes(axes: "Axes", boxes: Iterable[Box]) -> None:
    """Draw all boxes of a row that look the same as one collection."""
    together: dict[tuple[float, float, Style, bool], list[tuple[float, float]]] = defaultdict(list)
    for box in boxes:
        wide = _points(axes, box.width_ms) > 3
        together[box.top, box.height, box.style, wide].append((box.start_ms, box.width_ms))
    for (top, height, style, wide), spans in together.items():
        axes.broken_barh(spans, (top, height), **_look(style, wide=wide))


def _look(style: Style, *, wide: bool = True) -> dict[str, Any]:
    """How a box is drawn. A white outline parts neighbours; it would hide a box of a few pixels."""
    if style is IDLE:
        return {"facecolor": IDLE.colour, "edgecolor": IDLE.ink, "hatch": "/////", "linewidth": 0}
    outline = ("white", 0.7) if wide else (style.colour, 0.2)
    return {"facecolor": style.colour, "edgecolor": outline[0], "linewidth": outline[1]}


def _draw_labels(axes: "Axes", boxes: list[Box]) -> None:
    """Draw long labels or short ones, whichever more boxes have room for, the same for all."""

    def fitting(length: int) -> list[Box]:
        return [b for b in boxes if _text_points(b.labels[length]) <= _points(axes, b.width_ms)]

    length = max((0, 1), key=lambda length: len(fitting(length)))
    for box in fitting(length):
        axes.text(
            box.start_ms + box.width_ms / 2,
            box.top + box.height / 2,
            box.labels[length],
            fontsize=LABEL_POINTS,
            color=box.style.ink,
            ha="center",
            va="center_baseline",
        )


def _points(axes: "Axes", width_ms: float) -> float:
    """The width on the page, in points."""
    left, right = axes.get_xlim()
    return 72 * (WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES) * width_ms / (right - left)


def _text_points(text: str) -> float:
    """Points that a label takes with its margins; characters are 0.6 to 0.7 of their size wide."""
    return LABEL_POINTS * (0.66 * len(text) + 0.6)


def _draw_head(figure: "Figure", prediction: "Prediction", caption: str) -> None:
    degree = prediction.ulysses_degree
    ring = prediction.ranks // degree
    degrees = f" (Ulysses {degree} × ring {ring})" if degree > 1 and ring > 1 else ""
    title = f"{prediction.plan}, {prediction.direction.value}, {prediction.ranks} ranks{degrees}"
    _head_text(figure, LEFT_INCHES, 0.34, title, fontsize=13, fontweight="bold", color=INK)
    _head_text(figure, LEFT_INCHES, 0.58, headline(prediction), fontsize=9.5, color=INK)
    right = WIDTH_INCHES - RIGHT_INCHES
    _head_text(figure, right, 0.34, caption, fontsize=8.5, color=FAINT_INK, ha="right")


def _draw_legend(
    figure: "Figure", from_top: float, lane: str, boxes: Iterable[Box], styles: Iterable[Style]
) -> None:
    """Draw a legend of the `styles` that boxes have, each once, on one line."""
    from matplotlib.patches import Patch

    used = {box.style for box in boxes}
    styles = [style for style in dict.fromkeys(styles) if style in used]
    if not styles:
        return
    handles = [Patch(label=style.name, **_look(style)) for style in styles]
    _head_text(figure, LEFT_INCHES, from_top + 0.03, lane, fontsize=8.5, color=FAINT_INK)
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=_place(figure, LEFT_INCHES + 0.62, from_top),
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1.3,
        handleheight=0.8,
        handletextpad=0.5,
        columnspacing=1.6,
        borderpad=0,
    )


def _head_text(figure: "Figure", x: float, from_top: float, text: str, **look: Any) -> None:
    figure.text(*_place(figure, x, from_top), text, **look)


def _place(figure: "Figure", x_inches: float, from_top_inches: float) -> tuple[float, float]:
    """Turn inches from the left and from the top into parts of the figure."""
    width, height = figure.get_size_inches()
    return x_inches / width, 1 - from_top_inches / height
