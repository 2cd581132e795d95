"""The boxes of a timeline: who computes and receives what, when, in which row and colour.

What a rank computes is coloured by whose queries and keys it uses, what it receives by operand, in
the colours of Okabe and Ito (2008), which colour-blind readers tell apart too. Pure data:
milliseconds from left to right, a row of height 1 for each rank from top to bottom.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from longctx_patch.predict.attention.costs import Prediction
    from longctx_patch.predict.attention.simulate import Span

COMPUTE_LANE = (0.09, 0.56)
"""Top and height, as shares of a rank's row."""
TRANSFER_LANE = (0.69, 0.21)
INK = "#1A1A1A"


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
    """A box of the picture: horizontally in milliseconds, vertically in rows, one for each rank."""

    rank: int
    start_ms: float
    width_ms: float
    top: float
    height: float
    style: Style
    labels: tuple[str, ...] = ()
    """A long label and a short one."""

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.width_ms


def compute_boxes(prediction: "Prediction") -> list[Box]:
    """Boxes of what each rank computes, with labels."""
    spans = (span for span in prediction.timeline if span.lane == "compute")
    return [_compute_box(span, prediction) for span in spans]


def transfer_boxes(prediction: "Prediction") -> list[Box]:
    """Boxes of what each rank receives. Messages of one style that overlap become one box, and
    boxes that overlap share the height."""
    spans = (span for span in prediction.timeline if span.lane == "transfer")
    received = (_box(span, TRANSFER_LANE, TRANSFER_STYLES[span.label]) for span in spans)
    alike = _overlapping(received, lambda box: (box.rank, box.style))
    together = _overlapping(map(_hull, alike), lambda box: box.rank)
    return [box for group in together for box in _parted(group)]


def idle_boxes(compute: Iterable[Box], prediction: "Prediction") -> Iterator[Box]:
    """Boxes of the time in which a rank computes nothing, from the start to the makespan."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    for box in compute:
        boxes[box.rank].append(box)
    top, height = COMPUTE_LANE
    end = 1e3 * prediction.makespan_s
    for rank in range(prediction.ranks):
        edges = [0.0, *(t for box in sorted(boxes[rank]) for t in (box.start_ms, box.stop_ms)), end]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield Box(rank, start, stop - start, rank + top, height, IDLE)


def _compute_box(span: "Span", prediction: "Prediction") -> Box:
    """A box labelled `Q<rank> x KV<rank or all>`, in ranks of the ring, and a group of heads."""
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


def _box(span: "Span", lane: tuple[float, float], style: Style, *labels: str) -> Box:
    top, height = lane
    start, stop = 1e3 * span.start_s, 1e3 * span.stop_s
    return Box(span.rank, start, stop - start, span.rank + top, height, style, labels)


def _overlapping(boxes: Iterable[Box], key: Callable[[Box], Any]) -> list[list[Box]]:
    """Group boxes with the same key that overlap in time, one with the next."""
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
    """The box that spans the time of a whole group."""
    first, stop = group[0], max(box.stop_ms for box in group)
    return first._replace(width_ms=stop - first.start_ms)


def _parted(group: list[Box]) -> Iterator[Box]:
    """Give each style of a group its own part of the height."""
    styles = sorted({box.style for box in group})
    for box in group:
        height = box.height / len(styles)
        yield box._replace(top=box.top + styles.index(box.style) * height, height=height)
