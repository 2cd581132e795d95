"""Shows what `longctx eval` found, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longctx_patch.evaluation.scores import (
    ContextScores,
    compare_scores,
    in_k,
    panels_of,
    percent,
)
from longctx_patch.rules import strict_json

STOPS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colours of 0 to 100 %, which readers of all kinds of sight tell apart (viridis)."""
MOST_BESIDE = 3
"""Tasks whose heat maps stand side by side."""


class Result(NamedTuple):
    """Holds what scores.json has of one model."""

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


def table(models: Sequence[Result]) -> str:
    """All models side by side, with their notes."""
    notes = [f"{each.scores.label}: {note}" for each in models for note in each.notes]
    return "\n\n".join([compare_scores([each.scores for each in models]), "\n".join(notes)])


def draw(models: Sequence[Result], path: Path) -> None:
    """Draw heat maps of all models; nothing without tasks.

    Models stand below each other, or side by side if there are many tasks.
    """
    scores = [each.scores for each in models]
    if not (groups := panels_of(scores)):
        return
    labelled = [list(zip(group, scores, strict=True)) for group in groups]
    lines = labelled if len(groups) > MOST_BESIDE else list(zip(*labelled, strict=True))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    heights = [max(len(panel.rows) for panel, _ in line) + 2.2 for line in lines]
    widest = max(len(panel.columns) for group in groups for panel in group)
    figure = Figure(
        figsize=(len(lines[0]) * (0.62 * widest + 0.9) + 0.8, 0.36 * sum(heights) + 0.7),
        dpi=160,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lines), len(lines[0]), squeeze=False, height_ratios=heights)
    colours = LinearSegmentedColormap.from_list("scores", STOPS)
    for beside, line in zip(axes, lines, strict=True):
        for axis, (panel, model) in zip(beside, line, strict=True):
            grid = [
                [panel.values.get((r, c), float("nan")) for c in panel.columns] for r in panel.rows
            ]
            axis.imshow(grid, cmap=colours, norm=Normalize(0, 100), aspect="auto")
            axis.set_title(f"{model.label}: {panel.title}", fontsize=10)
            axis.set_xticks(range(len(panel.columns)), [in_k(c) for c in panel.columns], fontsize=9)
            axis.set_yticks(range(len(panel.rows)), panel.rows, fontsize=9)
            axis.tick_params(length=0)
            for (row, column), value in panel.values.items():
                place = panel.columns.index(column), panel.rows.index(row)
                ink = "black" if value > 55 else "white"
                axis.text(*place, percent(value), ha="center", va="center", color=ink, fontsize=9)
    figure.supxlabel("% right, by tokens of the row and depth", fontsize=8, color="#4d5866")
    figure.savefig(path)
