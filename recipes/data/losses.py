"""Counts what of the records is in no row: what is left out or cut off, why, and where it is.

A table counts this while it is made and keeps it beside its rows, so that whoever finds the table
made can still say it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx_patch.recipes.data.records import Record

MOST_LEFT_OUT = 0.01
"""Share of the records that a run may leave out without being told to."""
NUM_NAMED = 3
"""Records that are named for each reason: the first ones."""
EMPTY = "they are empty"
RULE = (
    f"A run leaves out {MOST_LEFT_OUT:.0%} of its records at most. Mend them or take them out; "
    "give longer rows (--seq-len); or allow it: --allow-dropped."
)


@dataclass
class Loss:
    """Counts what is lost for one reason."""

    num_records: int = 0
    num_tokens: int = 0
    num_learned: int = 0
    """How many of these tokens would have been learned."""
    places: list[str] = field(default_factory=list)
    """Where the first of these records are."""

    def add(self, other: "Loss") -> None:
        self.num_records += other.num_records
        self.num_tokens += other.num_tokens
        self.num_learned += other.num_learned
        self.places = [*self.places, *other.places][:NUM_NAMED]

    @property
    def learned(self) -> str:
        return f", {self.num_learned:,} of them to be learned" if self.num_learned else ""


@dataclass
class Losses:
    """Counted record by record. By reason: `left_out` are records without any row, `cut_off` are
    tokens of records that have one."""

    num_records: int = 0
    """All records, those in rows included."""
    left_out: dict[str, Loss] = field(default_factory=dict)
    cut_off: dict[str, Loss] = field(default_factory=dict)
    in_rows: dict[str, Loss] = field(default_factory=dict)
    """What else is to be said of records that are in rows."""
    refuses: bool = False
    """Whether to refuse a record that would be left out: a stream can't count them beforehand."""

    def leave_out(self, record: Record, why: str, num_tokens: int = 0, learned: int = 0) -> None:
        """Raises BadRecord where no record may be left out."""
        if self.refuses:
            raise record.refused(
                f"it would be left out of a stream, whose losses can't be counted before it ends: "
                f"{why}. Leave streaming out, or allow it: --allow-dropped."
            )
        _note(self.left_out, record, why, Loss(1, num_tokens, learned))

    def cut(self, record: Record, why: str, num_tokens: int, learned: int) -> None:
        _note(self.cut_off, record, why, Loss(1, num_tokens, learned))

    def note(self, record: Record, what: str, number: int = 1) -> None:
        """Count so many of something that the record has, and that the model sees or not."""
        _note(self.in_rows, record, what, Loss(1, number))

    @property
    def num_left_out(self) -> int:
        return sum(loss.num_records for loss in self.left_out.values())

    @property
    def are_many(self) -> bool:
        """Says whether a run has to be told that it may leave them out."""
        return self.num_left_out > MOST_LEFT_OUT * self.num_records

    @property
    def reasons(self) -> str:
        """Says why records are left out, and which ones first."""
        return "; ".join(_of(why, each) for why, each in self.left_out.items())

    def facts(self) -> list[tuple[str, str, str]]:
        """(what happens, how many, of what and why) for each reason."""
        found = []
        for why, each in self.left_out.items():
            tokens = f" ({each.num_tokens:,} tokens{each.learned})" if each.num_tokens else ""
            text = f"of {self.num_records:,} records{tokens}: {_of(why, each)}"
            found.append(("left out", f"{each.num_records:,}", text))
        for why, each in self.cut_off.items():
            text = f"tokens of {each.num_records:,} records{each.learned}: {_of(why, each)}"
            found.append(("cut off", f"{each.num_tokens:,}", text))
        for what, each in self.in_rows.items():
            text = f"in {each.num_records:,} records: {_of(what, each)}"
            found.append(("found", f"{each.num_tokens:,}", text))
        return found

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Losses":
        left_out, cut_off, in_rows = (
            {why: Loss(**loss) for why, loss in found.get(name, {}).items()}
            for name in ("left_out", "cut_off", "in_rows")
        )
        return cls(found["num_records"], left_out, cut_off, in_rows)

    @classmethod
    def joined(cls, each: Iterable["Losses"]) -> "Losses":
        """Joins what several tables have lost, in their order."""
        found = cls()
        for losses in each:
            found.num_records += losses.num_records
            for mine, others in (
                (found.left_out, losses.left_out),
                (found.cut_off, losses.cut_off),
                (found.in_rows, losses.in_rows),
            ):
                for why, loss in others.items():
                    mine.setdefault(why, Loss()).add(loss)
        return found


def say_losses(
    losses: Losses, name: str, *, allowed: bool, say: Callable[[str], object] = print
) -> None:
    """Print what a run does not train on, by its data's `name`.

    Raises ValueError where that is more of the records than a run may leave out without being told.
    """
    for what, number, text in losses.facts():
        say(f"{name}: {what} {number} {text}")
    if losses.are_many and not allowed:
        raise ValueError(f"{name}: {too_many(losses)}")


def too_many(losses: Losses) -> str:
    """Says why a run is refused that leaves out many records, and what to type."""
    share = losses.num_left_out / losses.num_records
    return (
        f"{losses.num_left_out:,} of {losses.num_records:,} records ({share:.1%}) would be left "
        f"out: {losses.reasons}. {RULE}"
    )


def _note(reasons: dict[str, Loss], record: Record, why: str, loss: Loss) -> None:
    found = reasons.setdefault(why, Loss())
    if found.num_records < NUM_NAMED:  # a line's number has to be counted
        loss.places.append(str(record.place))
    found.add(loss)


def _of(why: str, loss: Loss) -> str:
    return f"{why}; first: {'; '.join(loss.places)}"
