"""`longctx report`: a page of HTML with drawings in SVG. Texts of a run are escaped."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path

import click

from longctx_patch import __version__
from longctx_patch.cli.report_data import CONTEXT, MEMORY, Points, RunData, read_run

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 200, 62, 24
GIB = 2**30
COLOURS = ("#1f5fa8", "#c2570c", "#2a7f3f", "#8a3fa0", "#7a6a00", "#a3003c", "#00808a", "#4d5866")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: anywhere }
figure { display: inline-block; margin: 0 1rem 1.5rem 0; vertical-align: top }
figcaption { font-size: 14px }
pre { font-size: 13px; overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; margin-bottom: 1.5rem }
td, th { border-bottom: 1px solid #d9dee6; padding: .2rem .8rem .2rem 0; text-align: left;
         vertical-align: top; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #4d5866 }
.state { background: #eef2f7; padding: .5rem .8rem } .note { color: #a33c00 }
"""


@click.command("report", short_help="Write one HTML page about a run.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Page [report.html in RUN]."
)
def report_command(run: Path, out: Path | None) -> None:
    """Write one HTML page about RUN (a run folder or its output), also while it goes on.

    Loss, evaluation loss, learning rate, gradient norm, tokens per second and memory against the
    plan; the newest scores of `longctx eval`; the settings; what was decided and why. The page
    needs no network and runs no script.
    """
    data = read_run(run)
    target = out or run / "report.html"
    target.write_text(page(data), encoding="utf-8", errors="backslashreplace")
    click.echo("\n".join([data.state, *data.notes, f"Written to {target}: open it in a browser."]))
    if data.final:
        from longctx_patch.recipes.next_step import after_training

        click.echo(after_training(run, data.final, "report", *["eval"] * bool(data.scores)))


def page(data: RunData) -> str:
    """The whole page as text."""
    title = f"Run {data.folder.resolve().name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="state">{escape(data.state)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in data.notes),
        *_charts(data),
        *_context(data),
        *_table("Last steps", *_last_steps(data)),
        *_table("The start, until the first step", ("stage", "seconds"), data.start.items()),
        *_table("What `longctx patch` decided, and why", ("what", "decided", "why"), data.decided),
        *_table("Settings", ("setting", "value"), data.settings.items()),
        f"<p>longctx-patch {escape(__version__)}</p>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _context(data: RunData) -> Iterable[str]:
    """Returns what `longctx eval` has found last."""
    if data.scores is None:
        return
    from longctx_patch.cli.eval_result import read_result, table

    yield f"<h2>Does it use its context?</h2><p>{escape(str(data.scores))}</p>"
    try:
        yield f"<pre>{escape(table(read_result(data.scores)))}</pre>"
    except ValueError as error:  # of another version
        yield f'<p class="note">{escape(str(error))}</p>'
    if (picture := data.scores.with_suffix(".png")).is_file():
        drawn = b64encode(picture.read_bytes()).decode()
        yield f'<img src="data:image/png;base64,{drawn}" style="max-width: 100%">'


def _charts(data: RunData) -> Iterable[str]:
    series = data.series
    losses = {name: series[name] for name in ("loss", "eval_loss") if name in series}
    draw = partial(_chart, lengths=data.lengths)
    yield from draw("Loss", losses)
    for title, name in (
        ("Learning rate", "learning_rate"),
        ("Gradient norm, before clipping", "grad_norm"),
        ("Tokens per second, all devices", "tokens_per_second"),
    ):
        yield from draw(title, {name: series[name]} if name in series else {})
    context: dict[str, dict[str, Points]] = {}
    for name in series:
        if name.startswith(CONTEXT):
            _, what, *where = name.split("/")
            context.setdefault(what, {})["/".join(where) or what] = series[name]
    for what, curves in context.items():
        yield from draw(f"Context, {what}", curves)
    memory = [(step, value / GIB) for step, value in series.get(MEMORY, ())]
    planned = data.planned_bytes / GIB if data.planned_bytes else None
    yield from draw("Memory, GiB at most", {"peak": memory} if memory else {}, planned=planned)


def _chart(
    title: str,
    curves: dict[str, Points],
    planned: float | None = None,
    lengths: Sequence[tuple[int, int]] = (),
) -> Iterable[str]:
    """A drawing of curves over the same axes; nothing without values. Dotted lines are
    where rows of another length begin."""
    if not curves:
        return
    everything = [point for points in curves.values() for point in points]
    steps, values = [s for s, _ in everything], [v for _, v in everything]
    values += [] if planned is None else [planned]
    (x0, x1), (y0, y1) = _span(steps), _span(values)

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = (step - x0) / (x1 - x0), (value - y0) / (y1 - y0)
        return (
            round(LEFT + across * (WIDTH - LEFT - 8), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 10), 1),
        )

    said = "; ".join(f"{name} {points[-1][1]:.6g} at the end" for name, points in curves.items())
    said += "" if planned is None else f"; planned {planned:.6g}"
    said += "".join(f"; rows of {size:,} from step {step}" for step, size in lengths)
    yield f"<figure><figcaption><b>{escape(title)}</b>: {escape(said)}</figcaption>"
    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    yield from _axes((x0, x1), (y0, y1))
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        # The last point twice, so that a curve of one point is seen as a dot.
        line = " ".join("{},{}".format(*place(*point)) for point in (*points, points[-1]))
        look = f'fill="none" stroke="{colour}" stroke-width="1.5" stroke-linecap="round"'
        yield f'<polyline points="{line}" {look}><title>{name}</title></polyline>'
    for step, _ in lengths:
        if not x0 <= step <= x1:
            continue
        x = place(step, y0)[0]
        dotted = f'y1="8" y2="{HEIGHT - BOTTOM}" stroke="#4d5866" stroke-dasharray="1 3"'
        yield f'<line x1="{x}" x2="{x}" {dotted}/>'
    if planned is not None:
        y = place(x0, planned)[1]
        dashed = 'stroke="#4d5866" stroke-dasharray="5 4"'
        yield f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}" {dashed}/>'
    yield "</svg></figure>"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and highest value, apart from each other even where all are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _axes(steps: tuple[float, float], values: tuple[float, float]) -> Iterable[str]:
    floor, left = HEIGHT - BOTTOM, LEFT - 6
    yield f'<path d="M{LEFT} 8V{floor}H{WIDTH - 8}" fill="none" stroke="#9aa5b4"/>'
    yield f'<text x="{left}" y="{floor}" text-anchor="end">{_short(values[0])}</text>'
    yield f'<text x="{left}" y="16" text-anchor="end">{_short(values[1])}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 8}">step {steps[0]:g}</text>'
    yield f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">{steps[1]:g}</text>'


def _last_steps(data: RunData) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Ten steps of every metric, the newest first."""
    columns = {name: dict(points) for name, points in data.series.items()}
    steps = sorted({step for column in columns.values() for step in column})[:-11:-1]
    rows = [
        (f"{step:g}", *(f"{c[step]:.6g}" if step in c else "" for c in columns.values()))
        for step in steps
    ]
    return ("step", *columns), rows


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    """A heading and a table; nothing without rows."""
    lines = [
        "<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    ]
    if lines:
        yield f"<h2>{escape(title)}</h2><table><tr>"
        yield "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
        yield from (*lines, "</table>")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
