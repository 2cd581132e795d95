"""Draw a prediction: a row for each rank, with a lane of compute and a lane of transfers.

What a rank computes is coloured by whose queries and keys it uses, what it sends by operand, in the
colours of Okabe and Ito (2008), which colour-blind readers tell apart too. matplotlib is loaded at
first use.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from longctx_patch.costs import Prediction
    from longctx_patch.plans import Span

ENDINGS = (".png", ".svg", ".pdf")
MAX_RANKS = 64
"""More rows than this are too thin to read."""

WIDTH_INCHES = 11.0
LEFT_INCHES, RIGHT_INCHES, TOP_INCHES, BOTTOM_INCHES = 0.8, 0.25, 1.22, 0.55
COMPUTE_LANE = (0.09, 0.56)
"""Top and height, in parts of a rank's row."""
TRANSFER_LANE = (0.69, 0.21)
LABEL_POINTS = 7.0
INK, FAINT_INK, RULE = "#1A1A1A", "#5C5C5C", "#E3E3E3"


class Style(NamedTuple):
    """How blocks of one kind look, and what the legend calls them."""

    name: str
    colour: str
    ink: str = "white"


OWN = Style("own queries, own keys", "#0072B2")
OTHER_KEYS = Style("own queries, keys of others", "#56B4E9", INK)
HELPER = Style("queries of others, own keys", "#E69F00", INK)
ALL_KEYS = Style("own queries, all keys", "#56B4E9", INK)
OWN_HEADS = Style("own heads, all tokens", "#0072B2")
COMPUTE_STYLES = (OWN, OTHER_KEYS, ALL_KEYS, OWN_HEADS, HELPER)
IDLE = Style("idle or waiting", "#F6F6F6", "#C4C4C4")

_KEYS = Style("keys and values", "#009E73")
_QUERIES = Style("queries", "#CC79A7")
_D_KEYS = Style("gradients of keys and values", "#4D4D4D")
TRANSFER_STYLES = {
    "KV": _KEYS,
    "Q": _QUERIES,
    "Q_BACKWARD": _QUERIES._replace(name="queries, dout, lse, delta"),
    "OUT": Style("partial outputs", "#D55E00"),
    "DQ": Style("gradients of queries", "#D55E00"),
    "DQ_SUM": Style("gradients of queries", "#D55E00"),
    "DKV": _D_KEYS,
    "DKV_SUM": _D_KEYS,
    "ALL_TO_ALL": Style("all-to-all of heads", "#E6D200"),
}


class Box(NamedTuple):
    """A block on the page: milliseconds, and rows of ranks."""

    rank: int
    start_ms: float
    width_ms: float
    top: float
    height: float
    style: Style
    labels: tuple[str, ...] = ()
    """A long and a short one."""

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.width_ms


def check_drawable(path: Path, num_ranks: int) -> None:
    """Raise ValueError for a picture that `draw` could not make."""
    if path.suffix.lower() not in ENDINGS:
        png = path.parent / f"{path.stem or 'schedule'}.png"
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


def draw(prediction: "Prediction", path: Path, *, caption: str, dpi: int = 150) -> None:
    """Write the picture of a prediction made `with_timeline`; `caption` says what was assumed."""
    import matplotlib

    # Read when a figure is made and again when it is written.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 0.7}):
        make_figure(prediction, caption).savefig(path, dpi=dpi)


def make_figure(prediction: "Prediction", caption: str) -> "Figure":
    """The picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    row_inches = 0.46 if prediction.ranks <= 16 else 0.30
    height = TOP_INCHES + BOTTOM_INCHES + row_inches * prediction.ranks
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    axes = _add_axes(figure, prediction)
    compute = [_compute_box(span, prediction) for span in _lane(prediction, "compute")]
    transfers = _stacked(_transfer_box(span) for span in _lane(prediction, "transfer"))
    idle = [gap for gap in _gaps(compute, prediction) if _points(axes, gap.width_ms) > 4]
    for boxes in (compute, transfers, idle):
        _draw_boxes(axes, boxes)
    _draw_labels(axes, compute)
    _draw_head(figure, prediction, caption)
    _draw_legend(figure, 0.78, "compute", [*compute, *idle], (*COMPUTE_STYLES, IDLE))
    _draw_legend(figure, 0.99, "transfer", transfers, TRANSFER_STYLES.values())
    return figure


def headline(prediction: "Prediction") -> str:
    """Idle share, makespan and exposed communication, for the picture and the summary."""
    return (
        f"makespan {time_text(prediction.makespan_s)}   ·   "
        f"idle {100 * prediction.idle_fraction:.1f} %   ·   "
        f"exposed communication {time_text(prediction.exposed_communication_s)}"
    )


def time_text(seconds: float) -> str:
    """Three digits, in milliseconds below a second."""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def _lane(prediction: "Prediction", lane: str) -> "Iterator[Span]":
    return (span for span in prediction.timeline if span.lane == lane)


def _compute_box(span: "Span", prediction: "Prediction") -> Box:
    """The label is `Q<rank> x KV<rank or all>`, in ranks of the ring, and a group of heads."""
    if 1 < prediction.ulysses_degree == prediction.ranks:
        return _box(span, COMPUTE_LANE, OWN_HEADS, "own heads, all tokens", "own heads")
    own = str(span.rank // prediction.ulysses_degree)
    queries, _, keys, *group = span.label.split()
    if keys == "KVall":
        heads = "".join(f"head group {name[1:]}" for name in group) or "all heads"
        return _box(span, COMPUTE_LANE, ALL_KEYS, f"{queries}, {heads}", heads)
    full = f"{queries} × {keys}"
    if queries != f"Q{own}":
        return _box(span, COMPUTE_LANE, HELPER, full, queries)
    return _box(span, COMPUTE_LANE, OWN if keys == f"KV{own}" else OTHER_KEYS, full, keys)


def _transfer_box(span: "Span") -> Box:
    return _box(span, TRANSFER_LANE, TRANSFER_STYLES[span.label])


def _box(span: "Span", lane: tuple[float, float], style: Style, *labels: str) -> Box:
    top, height = lane
    start, stop = 1e3 * span.start_s, 1e3 * span.stop_s
    return Box(span.rank, start, stop - start, span.rank + top, height, style, labels)


def _stacked(boxes: Iterable[Box]) -> list[Box]:
    """What a rank receives at the same time: one box a style, and these share the lane's height."""
    joined = [_hull(group) for group in _overlapping(boxes, lambda box: (box.rank, box.style))]
    groups = _overlapping(joined, lambda box: box.rank)
    return [box for group in groups for box in _parted(group)]


def _overlapping(boxes: Iterable[Box], key: Callable[[Box], Any]) -> list[list[Box]]:
    """Groups of boxes with the same key that overlap in time, one with the next."""
    groups: list[list[Box]] = []
    reached = 0.0
    for box in sorted(boxes, key=lambda box: (key(box), box.start_ms)):
        if groups and key(groups[-1][0]) == key(box) and box.start_ms < reached:
            groups[-1].append(box)
            reached = max(reached, box.stop_ms)
        else:
            groups.append([box])
            reached = box.stop_ms
    return groups


def _hull(group: list[Box]) -> Box:
    first, stop = group[0], max(box.stop_ms for box in group)
    return first._replace(width_ms=stop - first.start_ms)


def _parted(group: list[Box]) -> Iterator[Box]:
    styles = sorted({box.style for box in group})
    for box in group:
        height = box.height / len(styles)
        yield box._replace(top=box.top + styles.index(box.style) * height, height=height)


def _gaps(compute: Iterable[Box], prediction: "Prediction") -> Iterator[Box]:
    """Where a rank computes nothing, from the start to the makespan."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    for box in compute:
        boxes[box.rank].append(box)
    top, height = COMPUTE_LANE
    end = 1e3 * prediction.makespan_s
    for rank in range(prediction.ranks):
        edges = [0.0, *(t for box in sorted(boxes[rank]) for t in (box.start_ms, box.stop_ms)), end]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield Box(rank, start, stop - start, rank + top, height, IDLE)


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
    """One collection for all boxes of a row that look the same."""
    together: dict[tuple[float, float, Style, bool], list[tuple[float, float]]] = defaultdict(list)
    for box in boxes:
        wide = _points(axes, box.width_ms) > 3
        together[box.top, box.height, box.style, wide].append((box.start_ms, box.width_ms))
    for (top, height, style, wide), spans in together.items():
        axes.broken_barh(spans, (top, height), **_look(style, wide=wide))


def _look(style: Style, *, wide: bool = True) -> dict[str, Any]:
    """A white outline parts neighbours; it would hide a box of a few pixels."""
    if style is IDLE:
        return {"facecolor": IDLE.colour, "edgecolor": IDLE.ink, "hatch": "/////", "linewidth": 0}
    outline = ("white", 0.7) if wide else (style.colour, 0.2)
    return {"facecolor": style.colour, "edgecolor": outline[0], "linewidth": outline[1]}


def _draw_labels(axes: "Axes", boxes: list[Box]) -> None:
    """Long labels or short ones, whichever more boxes have room for, and the same for all."""

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
    """Width on the page."""
    left, right = axes.get_xlim()
    return 72 * (WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES) * width_ms / (right - left)


def _text_points(text: str) -> float:
    """Room for a label and its margins: a character of this font is 0.6 to 0.7 of its size wide."""
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
    """Those of `styles` that boxes have, each once, on one line."""
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
    """In parts of the figure."""
    width, height = figure.get_size_inches()
    return x_inches / width, 1 - from_top_inches / height
