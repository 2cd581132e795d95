"""What `longctx eval` found, as a table and as a picture."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from longctx_patch.cli.text_table import aligned
from longctx_patch.evaluation.scores import Cell, ContextScores, in_k
from longctx_patch.rules import strict_json

STOPS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colours of 0 to 100 %, which readers of all kinds of sight tell apart (viridis)."""


class Panel(NamedTuple):
    """Scores of one model in percent, by what stands left and by lengths."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[int, ...]
    values: Mapping[tuple[str, int], float]
    """What those that were evaluated have."""


class Result(NamedTuple):
    """What scores.json holds of one model."""

    notes: tuple[str, ...]
    """What a reader has to know of the model: that lengths are beyond its reach, say."""
    scores: ContextScores


def read_result(file: Path) -> list[Result]:
    """The models of a scores.json. Raises ValueError for another file, OSError."""
    try:
        content = strict_json.loads(file.read_text(encoding="utf-8"))
        return [
            Result(tuple(each["notes"]), ContextScores.from_json(each["scores"]))
            for each in content["models"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no scores of `longctx eval` ({error}).") from error


def panels(scores: ContextScores) -> list[Panel]:
    """One panel for each task whose needles lie at given depths, and one for all other tasks."""
    found, others = list[Panel](), list[tuple[str, Cell]]()
    for name, task in scores.tasks.items():
        if any(cell.depth is None for cell in task.cells):
            others += [(name, cell) for cell in task.cells]
        else:
            found.append(_panel(name, [(f"{100 * (c.depth or 0):g} %", c) for c in task.cells]))
    return [*found, _panel("tasks", others)] if others else found


def _panel(title: str, cells: Sequence[tuple[str, Cell]]) -> Panel:
    rows = tuple(dict.fromkeys(row for row, _ in cells))
    columns = tuple(sorted({cell.length for _, cell in cells}))
    return Panel(title, rows, columns, {(row, c.length): 100 * c.score for row, c in cells})


def _groups(models: Sequence[Result]) -> list[tuple[Panel, ...]]:
    """The panels of each task, of all models."""
    return list(zip(*(panels(each.scores) for each in models), strict=True))


def table(models: Sequence[Result]) -> str:
    """All models side by side: tasks by depth and length, and losses by position."""
    labels = [each.scores.label for each in models]
    blocks = [_block(group, labels) for group in _groups(models)]
    head, *losses = _losses_by_position(models)
    if losses:
        blocks.append(aligned([["loss by position", *head[1:]], *losses]))
    notes = [f"{each.scores.label}: {note}" for each in models for note in each.notes]
    tasks = models[0].scores.tasks.items()
    notes += [f"{name}: {task.note}" for name, task in tasks if task.note]
    return "\n\n".join(map("\n".join, [*blocks, notes]))


def _losses_by_position(models: Sequence[Result]) -> list[list[str]]:
    """A head, and a line for each model that has them."""
    head, rows = ["model"], list[list[str]]()
    for scores in (each.scores for each in models):
        if (found := scores.loss_by_position) is not None:
            head = ["model", *(f"{in_k(a)}-{in_k(b)}" for a, b in pairwise(found.edges))]
            rows.append([scores.label, *("-" if x is None else f"{x:.4f}" for x in found.loss)])
        if scores.longppl is not None:
            head.append("LongPPL")
            rows[-1].append(f"{scores.longppl.longppl or math.nan:.4f}")
    return [head, *rows]


def _block(group: Sequence[Panel], labels: Sequence[str]) -> list[str]:
    """A task's panels beside each other, in percent; the last line is the mean."""
    first = group[0]
    parts = [aligned([[f"{first.title}, %"], [""], *([row] for row in first.rows), ["mean"]])]
    for panel, label in zip(group, labels, strict=True):
        rows = [[in_k(length) for length in panel.columns]]
        rows += [[_percent(panel.values.get((r, c))) for c in panel.columns] for r in panel.rows]
        rows.append([_percent(_mean(panel, length)) for length in panel.columns])
        parts.append([label, *("".join(cell.rjust(6) for cell in row) for row in rows)])
    return aligned(list(zip(*parts, strict=True)))


def _mean(panel: Panel, column: int) -> float | None:
    found = [value for (_, length), value in panel.values.items() if length == column]
    return sum(found) / len(found) if found else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def draw(models: Sequence[Result], path: Path) -> None:
    """Draw heat maps of all models, side by side for each task; nothing without tasks."""
    if not (groups := _groups(models)):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    heights = [len(group[0].rows) + 2.2 for group in groups]
    widest = max(len(panel.columns) for group in groups for panel in group)
    figure = Figure(
        figsize=(len(models) * (0.62 * widest + 0.9) + 0.8, 0.36 * sum(heights) + 0.7),
        dpi=160,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), len(models), squeeze=False, height_ratios=heights)
    colours = LinearSegmentedColormap.from_list("scores", STOPS)
    for line, group in zip(axes, groups, strict=True):
        for axis, panel, model in zip(line, group, models, strict=True):
            grid = [
                [panel.values.get((r, c), float("nan")) for c in panel.columns] for r in panel.rows
            ]
            axis.imshow(grid, cmap=colours, norm=Normalize(0, 100), aspect="auto")
            axis.set_title(f"{model.scores.label}: {panel.title}", fontsize=10)
            axis.set_xticks(range(len(panel.columns)), [in_k(c) for c in panel.columns], fontsize=9)
            axis.set_yticks(range(len(panel.rows)), panel.rows, fontsize=9)
            axis.tick_params(length=0)
            for (row, column), value in panel.values.items():
                place = panel.columns.index(column), panel.rows.index(row)
                ink = "black" if value > 55 else "white"
                axis.text(*place, _percent(value), ha="center", va="center", color=ink, fontsize=9)
    figure.supxlabel("% right, by tokens of the row and depth", fontsize=8, color="#4d5866")
    figure.savefig(path)
