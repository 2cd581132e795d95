"""Holds what an evaluation found: as values, as JSON, and as tables in plain text."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from longctx_patch.evaluation.longppl import LongPPL
from longctx_patch.evaluation.positions import PositionLosses
from longctx_patch.evaluation.tasks.sample import Scoring
from longctx_patch.rules import strict_json
from longctx_patch.rules.text_table import aligned

FORMAT = 1
"""The version of the JSON; a reader refuses others."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The mean score of samples of one task, length and depth."""

    length: int
    depth: float | None
    """From 0, the beginning of the text, to 1; None where a sample has no one depth."""
    score: float
    """From 0 to 1."""
    samples: int


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of one task."""

    scoring: Scoring
    cells: tuple[Cell, ...]
    note: str = ""
    """Where the task is not as it was published, in words."""

    def at(self, length: int) -> float:
        """The mean over the depths of a length; each counts by its samples."""
        cells = [cell for cell in self.cells if cell.length == length]
        samples = sum(cell.samples for cell in cells)
        return sum(cell.score * cell.samples for cell in cells) / samples


@dataclass(frozen=True, kw_only=True)
class ContextScores:
    """Holds what an evaluation found, the same on every rank; print it, or `as_json()`."""

    label: str
    """What was evaluated, in the reader's words."""
    lengths: tuple[int, ...]
    loss_by_position: PositionLosses | None
    """On texts of the greatest length; None without texts."""
    longppl: LongPPL | None
    """On the same texts; None where it was not asked for."""
    tasks: dict[str, TaskScores]
    seed: int
    tokens: int
    """How many tokens went through the model, each counted once."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`, which `from_json` reads.

        The keys are the names of the fields, of the dataclasses within too: `loss_by_position` has
        `edges`, `loss`, `tokens`, `texts` and `standard_error`; `longppl` has `longppl`,
        `perplexity`, `key_tokens` and `tokens`; each of `tasks` has `scoring`, `cells` (`length`,
        `depth`, `score`, `samples`) and `note`. `format` is beside them.
        """
        return {"format": FORMAT} | json.loads(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def from_json(cls, found: Any) -> "ContextScores":
        """The scores that `as_json` wrote. Raises ValueError for anything else."""
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            said = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise ValueError(
                f"these are no scores of this version: format {said!r}, not {FORMAT}. Evaluate "
                "again."
            )
        try:
            given = {field.name: found[field.name] for field in fields(cls)}
            by_position, ppl = given["loss_by_position"], given["longppl"]
            tasks = {
                name: TaskScores(**task | {"cells": tuple(Cell(**cell) for cell in task["cells"])})
                for name, task in given["tasks"].items()
            }
            losses = by_position and {name: tuple(values) for name, values in by_position.items()}
            return cls(
                **given
                | {
                    "lengths": tuple(given["lengths"]),
                    "loss_by_position": PositionLosses(**losses) if losses else None,
                    "longppl": LongPPL(**ppl) if ppl else None,
                    "tasks": tasks,
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"scores with a part missing or of another type: {error!r}") from None

    @classmethod
    def read(cls, file: Path) -> "ContextScores":
        """Reads the scores in a JSON file. Raises ValueError with its name, or OSError."""
        try:
            return cls.from_json(strict_json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def table(self) -> str:
        """Losses by position, LongPPL, and of each task the scores by depth and length."""
        return compare_scores([self])

    def __str__(self) -> str:
        return self.table()


class Panel(NamedTuple):
    """Scores of one model in percent, by what stands left and by lengths."""

    title: str
    rows: tuple[str, ...] = ()
    columns: tuple[int, ...] = ()
    values: Mapping[tuple[str, int], float] = MappingProxyType({})
    """What those that were evaluated have."""
    samples: frozenset[int] = frozenset()
    """The numbers of samples that stand behind values."""


def panels_of(scores: Sequence[ContextScores]) -> list[tuple[Panel, ...]]:
    """The panels of each task, of all models; empty ones of a model that has none of the task."""
    each = [{panel.title: panel for panel in _panels(found)} for found in scores]
    titles = dict.fromkeys(title for found in each for title in found)
    return [tuple(found.get(title, Panel(title)) for found in each) for title in titles]


def _panels(scores: ContextScores) -> list[Panel]:
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
    values = {(row, c.length): 100 * c.score for row, c in cells}
    return Panel(title, rows, columns, values, frozenset(c.samples for _, c in cells))


def compare_scores(scores: Sequence[ContextScores]) -> str:
    """Several models' scores side by side: tasks by depth and length, and losses by position.

    Example:
        >>> print(compare_scores([base, tuned]))  # doctest: +SKIP
    """
    labels = [each.label or f"model {number}" for number, each in enumerate(scores, start=1)]
    blocks = [_block(group, labels) for group in panels_of(scores)]
    blocks.append(_losses_by_position(scores, labels))
    tasks = {name: task for each in scores for name, task in each.tasks.items()}
    blocks.append([f"{name}: {task.note}" for name, task in tasks.items() if task.note])
    blocks.append([*_silent(scores)])
    return "\n\n".join(map("\n".join, filter(None, blocks)))


def _silent(scores: Sequence[ContextScores]) -> Iterable[str]:
    """Says of a task that no model can do at any length that it shows nothing."""
    for name in dict.fromkeys(name for each in scores for name in each.tasks):
        cells = [cell for each in scores if name in each.tasks for cell in each.tasks[name].cells]
        if not any(cell.score for cell in cells):
            shortest = in_k(min(cell.length for cell in cells))
            yield (
                f"{name}: 0 at {shortest} tokens too, so it says nothing about a context. Read the "
                "losses by position (--text), or take a task that a model can do."
            )


def _losses_by_position(scores: Sequence[ContextScores], labels: Sequence[str]) -> list[str]:
    """A head, and a line for each model; nothing where no model has losses."""
    rows = list[dict[str, str]]()
    for each, label in zip(scores, labels, strict=True):
        row, found = {"loss by position": label}, each.loss_by_position
        if found and found.texts:
            row["texts"] = str(max(found.texts))
        edges, losses = (found.edges, found.loss) if found else ((), ())
        errors = (found and found.standard_error) or (None,) * len(losses)
        for (start, stop), loss, error in zip(pairwise(edges), losses, errors, strict=True):
            spread = "" if error is None else f" ±{error:.4f}"
            row[f"{in_k(start)}-{in_k(stop)}"] = "-" if loss is None else f"{loss:.4f}{spread}"
        if each.longppl is not None:
            row["LongPPL"] = f"{each.longppl.longppl or math.nan:.4f}"
        rows += [row] if len(row) > 1 else []
    head = dict.fromkeys(name for row in rows for name in row)
    lines = [[row.get(name, "") for name in head] for row in rows]
    note = "±: standard error of the mean over the texts"
    has_errors = any("±" in cell for line in lines for cell in line)
    return [*aligned([[*head], *lines]), *([note] if has_errors else [])] if lines else []


def _block(group: Sequence[Panel], labels: Sequence[str]) -> list[str]:
    """A task's panels beside each other, in percent; the last line is the mean."""
    names = dict.fromkeys(row for panel in group for row in panel.rows)
    found = sorted({number for panel in group for number in panel.samples})
    each = " to ".join(map(str, dict.fromkeys((found[0], found[-1]))))
    samples = f"{each} sample{'s' * (found[-1] > 1)} each"
    first = (f"{group[0].title}, %", samples, *names, "mean")
    parts = [aligned([[name] for name in first])]
    for panel, label in zip(group, labels, strict=True):
        rows = [[in_k(length) for length in panel.columns]]
        rows += [[percent(panel.values.get((r, c))) for c in panel.columns] for r in names]
        rows.append([percent(_mean(panel, length)) for length in panel.columns])
        parts.append([label, *("".join(cell.rjust(6) for cell in row) for row in rows)])
    return aligned(list(zip(*parts, strict=True)))


def _mean(panel: Panel, column: int) -> float | None:
    found = [value for (_, length), value in panel.values.items() if length == column]
    return sum(found) / len(found) if found else None


def percent(value: float | None) -> str:
    """A score in percent, as tables and pictures have it."""
    return "-" if value is None else f"{value:.0f}"


def in_k(tokens: int) -> str:
    """A number of tokens as this field writes it: 64K; others as they are.

    Example:
        >>> in_k(65536), in_k(1_048_576), in_k(1000)
        ('64K', '1M', '1000')
    """
    if tokens and tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)
