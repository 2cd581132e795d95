"""What an evaluation found: as values, as JSON, and as tables in plain text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from longctx_patch.evaluation.longppl import LongPPL
from longctx_patch.evaluation.positions import PositionLosses
from longctx_patch.evaluation.tasks.sample import Scoring
from longctx_patch.rules import strict_json

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
    """What an evaluation found, the same on every rank; print it, or `as_json()`."""

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
        `edges`, `loss` and `tokens`; `longppl` has `longppl`, `perplexity`, `key_tokens` and
        `tokens`; each of `tasks` has `scoring`, `cells` (`length`, `depth`, `score`, `samples`) and
        `note`. `format` is beside them.
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
                name: TaskScores(
                    scoring=task["scoring"],
                    note=task["note"],
                    cells=tuple(Cell(**cell) for cell in task["cells"]),
                )
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
        parts = [_summary([self])]
        for name, task in self.tasks.items():
            depths = list(dict.fromkeys(cell.depth for cell in task.cells))
            by_place = {(cell.depth, cell.length): cell.score for cell in task.cells}
            rows = [
                [_depth(depth), *(_percent(by_place.get((depth, n))) for n in self.lengths)]
                for depth in depths
            ]
            head = ["depth", *map(in_k, self.lengths)]
            note = f"  ({task.note})" if task.note else ""
            parts.append(f"{name}, {task.scoring}{note}\n{_aligned([head, *rows])}")
        return "\n\n".join(filter(None, parts))

    def __str__(self) -> str:
        return self.table()


def compare_scores(scores: Sequence[ContextScores]) -> str:
    """Several models' scores in one table, a line each: base beside tuned.

    Example:
        >>> print(compare_scores([base, tuned]))  # doctest: +SKIP
    """
    return _summary(scores)


def _summary(scores: Sequence[ContextScores]) -> str:
    """A table for the losses by position, and one with the mean of each task at each length; models
    that have none of a column leave it empty."""
    names = [each.label or f"model {number}" for number, each in enumerate(scores, start=1)]
    of_losses: dict[str, dict[int, str]] = {}
    of_tasks: dict[str, dict[int, str]] = {}
    for number, each in enumerate(scores):
        if (by_position := each.loss_by_position) is not None:
            edges = by_position.edges
            for start, stop, loss in zip(edges, edges[1:], by_position.loss, strict=False):
                said = "-" if loss is None else f"{loss:.3f}"
                of_losses.setdefault(f"{in_k(start)}-{in_k(stop)}", {})[number] = said
        if (ppl := each.longppl) is not None:
            said = "-" if ppl.longppl is None else f"{ppl.longppl:.3f}"
            of_losses.setdefault("LongPPL", {})[number] = said
        for name, task in each.tasks.items():
            for length in sorted({cell.length for cell in task.cells}):
                said = _percent(task.at(length))
                of_tasks.setdefault(f"{name} {in_k(length)}", {})[number] = said
    tables = []
    if of_losses:
        head = ["loss by position", *of_losses]
        lines = [[n, *(c.get(k, "") for c in of_losses.values())] for k, n in enumerate(names)]
        tables.append(_aligned([head, *lines]))
    if of_tasks:
        lines = [[said, *(c.get(k, "") for k in range(len(names)))] for said, c in of_tasks.items()]
        tables.append(_aligned([["mean over depths", *names], *lines]))
    return "\n\n".join(tables)


def in_k(tokens: int) -> str:
    """A number of tokens as this field writes it: 64K; others as they are.

    Example:
        >>> in_k(65536), in_k(1_048_576), in_k(1000)
        ('64K', '1M', '1000')
    """
    if tokens and tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def _depth(depth: float | None) -> str:
    return "-" if depth is None else f"{100 * depth:g} %"


def _percent(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.0f} %"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
