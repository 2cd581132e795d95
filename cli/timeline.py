"""The picture of a prediction: a row for each rank, with what it computes and what it receives.

Computing is coloured by whose queries and keys it uses, receiving by operand, in the colours of
Okabe and Ito (2008), which colour-blind readers tell apart too. matplotlib is loaded at first use.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from longctx_patch.cli.mask_picture import draw_mask
from longctx_patch.config import LongContextConfig
from longctx_patch.planner.attention_cost import Prediction, Workload, predict
from longctx_patch.planner.degrees import decide
from longctx_patch.planner.machines import MACHINES, Hardware
from longctx_patch.planner.simulate import Span
from longctx_patch.plans import Direction
from longctx_patch.rules.text_table import time_text
from longctx_patch.sequence.placement import place

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ENDINGS = (".png", ".svg", ".pdf")
MAX_RANKS = 64
"""More rows than this are too thin to read."""
LANES = {"compute": (0.09, 0.56), "transfer": (0.69, 0.21)}
"""Top and height, as shares of a rank's row."""
OWN = ("own queries, own keys", "#0072B2")
OTHER_KEYS = ("own queries, keys of others", "#56B4E9")
ALL_KEYS = ("own queries, all keys", "#56B4E9")
HELPER = ("queries of others, own keys", "#E69F00")
OWN_HEADS = ("own heads, all tokens", "#0072B2")
TRANSFERS = {
    "KV": ("keys and values", "#009E73"),
    "Q": ("queries", "#CC79A7"),
    "Q_BACKWARD": ("queries, dout, lse, delta", "#CC79A7"),
    "OUT": ("partial outputs", "#D55E00"),
    "DQ": ("gradients of queries", "#D55E00"),
    "DQ_SUM": ("gradients of queries", "#D55E00"),
    "DKV": ("gradients of keys and values", "#4D4D4D"),
    "DKV_SUM": ("gradients of keys and values", "#4D4D4D"),
    "ALL_TO_ALL": ("all-to-all of heads", "#E6D200"),
}


class Bar(NamedTuple):
    """A bar in the row of a rank, in milliseconds."""

    rank: int
    lane: str
    start_ms: float
    width_ms: float
    style: tuple[str, str]
    """What the legend calls it, and its colour."""


def bars_of(prediction: Prediction) -> list[Bar]:
    """Every span of a prediction that was made `with_timeline`."""
    return [
        Bar(
            span.rank,
            span.lane,
            1e3 * span.start_s,
            1e3 * (span.stop_s - span.start_s),
            TRANSFERS[span.label] if span.lane == "transfer" else _computed(span, prediction),
        )
        for span in prediction.timeline
    ]


def _computed(span: Span, prediction: Prediction) -> tuple[str, str]:
    """Returns what `Q<rank> x KV<rank or all>` is to this rank; ranks are those of the ring."""
    if 1 < prediction.ulysses_degree == prediction.ranks:
        return OWN_HEADS
    own = span.rank // prediction.ulysses_degree
    queries, _, keys, *_ = span.label.split()
    if keys == "KVall":
        return ALL_KEYS
    if queries != f"Q{own}":
        return HELPER
    return OWN if keys == f"KV{own}" else OTHER_KEYS


def require_matplotlib(asked: str) -> None:
    """Raise ValueError where it is not installed; `asked` is what wants a picture."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{asked}: pictures are drawn with matplotlib, which is not installed. "
            "Run: pip install longctx-patch[draw]"
        )


def check_drawable(path: Path, num_ranks: int) -> None:
    """Raise ValueError for a picture that `draw` could not make."""
    if path.suffix.lower() not in ENDINGS:
        stem = "schedule" if path.stem in ("", *ENDINGS) else path.stem
        raise ValueError(
            f"--out {str(path)!r}: the ending chooses the format, one of {', '.join(ENDINGS)}. "
            f"Use --out {str(path.parent / f'{stem}{ENDINGS[0]}')!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--out {str(path)!r}: there is no folder {str(path.parent)!r}, and none is made. "
            "Make it first, or give another folder."
        )
    require_matplotlib(f"--out {str(path)!r}")
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"--out with --ranks {num_ranks}: a picture has a row for each rank, and more than "
            f"{MAX_RANKS} can't be read. Use --ranks {MAX_RANKS} or fewer, or --json without --out."
        )


def draw(
    prediction: Prediction, path: Path | BinaryIO, *, caption: str, workload: Workload
) -> None:
    """Write the picture of a prediction made `with_timeline`; `caption` says what was assumed.

    A file that is open gets a PNG.
    """
    make_figure(prediction, caption, workload).savefig(path, dpi=110)


def make_figure(prediction: Prediction, caption: str, workload: Workload) -> "Figure":
    """Make the picture as matplotlib's figure; that of a row with branches shows its mask too."""
    from matplotlib.figure import Figure

    ranks, bars = prediction.ranks, bars_of(prediction)
    figure = Figure(figsize=(11, 2 + 0.4 * ranks), layout="constrained")
    if workload.documents().has_branches:
        beside, axes = figure.subplots(1, 2, width_ratios=(2, 3))
        degree = prediction.ulysses_degree
        layout = place(
            prediction.layout, workload.documents(), ring=ranks // degree, ulysses=degree
        )
        draw_mask(beside, workload.mask(), layout)
    else:
        axes = figure.subplots()
    for style in dict.fromkeys(bar.style for bar in bars):
        _draw_style(axes, style, (bar for bar in bars if bar.style == style))
    axes.set(xlim=(0, 1e3 * prediction.makespan_s), ylim=(ranks, 0), xlabel="time (ms)")
    axes.set_yticks([rank + 0.48 for rank in range(ranks)], [f"rank {r}" for r in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    figure.suptitle(f"{title_of(prediction)}\n{caption}", fontsize=10)
    return figure


def _draw_style(axes: Any, style: tuple[str, str], bars: Iterable[Bar]) -> None:
    """Draw the bars of one style as one collection for each row, with one entry of the legend."""
    name, colour = style
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in bars:
        rows.setdefault((bar.rank, bar.lane), []).append((bar.start_ms, bar.width_ms))
    for number, ((rank, lane), spans) in enumerate(rows.items()):
        top, height = LANES[lane]
        label = None if number else name
        look = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.broken_barh(spans, (rank + top, height), **look)


def title_of(prediction: Prediction) -> str:
    """The plan and what it takes, on two lines."""
    degree = prediction.ulysses_degree
    ring = prediction.ranks // degree
    degrees = f" (Ulysses {degree} × ring {ring})" if degree > 1 and ring > 1 else ""
    return (
        f"{prediction.plan}, {prediction.direction.value}, {prediction.ranks} ranks{degrees}\n"
        f"makespan {time_text(prediction.makespan_s)}, waiting "
        f"{prediction.waiting_fraction:.1%} of the GPUs' time, lost to messages "
        f"{time_text(prediction.exposed_communication_s)}"
    )


class Picture(NamedTuple):
    """A picture that a notebook shows where it is the last value of a cell."""

    png: bytes

    def __repr__(self) -> str:
        return f"<picture of {len(self.png)} bytes>"

    def _repr_png_(self) -> bytes:
        """IPython's name for it."""
        return self.png


def draw_schedule(
    config: LongContextConfig,
    workload: Workload,
    direction: Literal["forward", "backward"] = "forward",
) -> Picture:
    """Draw what a config runs in one attention call, on the GPUs of `config.hardware`.

    Raises ValueError without matplotlib, for more ranks than can be drawn, and for a plan or
    degrees that don't fit the workload.

    Example:
        >>> workload = Workload(num_tokens=131072)
        >>> draw_schedule(LongContextConfig(ring_degree=4), workload)  # doctest: +SKIP
    """
    require_matplotlib("draw_schedule")
    if config.sequence_degree > MAX_RANKS:
        raise ValueError(
            f"{config.degrees_in_words} = {config.sequence_degree} ranks: a picture has a row for "
            f"each rank, and more than {MAX_RANKS} can't be read. Use smaller degrees."
        )
    hardware = MACHINES[config.hardware]
    setting = decide(config, workload)
    prediction = predict(setting, Direction(direction), workload, hardware, with_timeline=True)
    draw(prediction, file := BytesIO(), caption=describe(workload, hardware), workload=workload)
    return Picture(file.getvalue())


def describe(workload: Workload, hardware: Hardware) -> str:
    """Returns what was assumed, on one line."""
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    heads = f"{workload.num_heads} / {workload.num_kv_heads} heads of {workload.head_dim}"
    heads += f", latents of {workload.latent_dim}" if workload.latent_dim else ""
    seen = f", {len(workload.lengths)} documents" if len(workload.lengths) > 1 else ""
    num_branches = sum(parent >= 0 for parent in workload.parents)
    seen += f" of which {num_branches} are branches" if num_branches else ""
    seen += f", a window of {workload.window:,}" if workload.window else ""
    on = f"{hardware.name} with {hardware.kernels.of(workload.head_dim).kernel}"
    on += f" ({hardware.note})" if hardware.note else ""
    return f"{batch}{workload.num_tokens:,} tokens{seen}, {heads}, bfloat16, {on}"
