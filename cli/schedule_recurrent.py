"""What `longctx schedule MODEL` says of the model's recurrent layers, beside those of attention."""

from dataclasses import dataclass
from typing import Any

from longctx_patch.choose.recurrence import RecurrentWork
from longctx_patch.cli.text_table import size_text
from longctx_patch.cli.timeline import time_text
from longctx_patch.families.facts import ModelFacts
from longctx_patch.families.recurrent_layers import recurrent_layers
from longctx_patch.plans.generators.setting import Setting
from longctx_patch.plans.recurrent import RecurrentShape, RecurrentWay, states_because
from longctx_patch.plans.types import Direction
from longctx_patch.predict.attention.costs import Workload
from longctx_patch.predict.machines import Hardware
from longctx_patch.predict.recurrence import RecurrencePrediction, Row, predict_recurrence


@dataclass(frozen=True)
class Beside:
    """What each recurrent layer takes, by the ways that are possible."""

    num_layers: int
    shape: RecurrentShape
    ways: tuple[RecurrencePrediction, ...]
    source: str
    """Where the rates are from."""

    @property
    def taken(self) -> RecurrentWay:
        """The faster way over forward and backward; `states` if both are as fast."""
        return min(self.ways, key=lambda found: found.seconds()).way

    def as_json(self, direction: Direction) -> dict[str, Any]:
        ways = {
            found.way: {
                "makespan_s": _seconds(found, direction),
                "bytes_sent_per_rank": _sent(found, direction),
            }
            for found in self.ways
        }
        head = {"num_layers": self.num_layers, "kind": self.shape.kind, "rates": self.source}
        return {"recurrent": head | {"taken": self.taken} | ways}

    def render(self, direction: Direction) -> str:
        shape = self.shape
        lines = [
            f"\n\nBeside it: {self.num_layers} recurrent layers ({shape.kind}, {shape.num_heads} / "
            f"{shape.num_groups} heads, states of {shape.key_dim} x {shape.value_dim}), each by "
            f"rates {self.source}"
        ]
        for found in self.ways:
            sent = _sent(found, direction)
            ends = [size_text(min(sent)), size_text(max(sent))]
            taken = " (taken: forward and backward together)" if found.way == self.taken else ""
            lines.append(
                f"{found.way:<9} {time_text(_seconds(found, direction))}, "
                f"{' to '.join(dict.fromkeys(ends))} per rank{taken}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Recurrences:
    """The recurrent layers of a model."""

    num_layers: int
    num_attention_layers: int
    shape: RecurrentShape

    @classmethod
    def of(cls, config: Any, batch: int) -> "Recurrences | None":
        """None for models without them, or with short convolutions alone."""
        layers = recurrent_layers(config, batch=batch)
        if layers is None or layers.recurrence is None:
            return None
        return cls(layers.num_layers, len(ModelFacts.of(config).reaches), layers.recurrence)

    def per_attention_layer(self, workload: Workload) -> dict[RecurrentWork, float]:
        """How many there are for each layer with attention."""
        work = RecurrentWork(self.shape, workload.documents())
        return {work: self.num_layers / self.num_attention_layers}

    def counted(self, hardware: Hardware) -> str:
        """What the choice of degrees counts of them."""
        source = hardware.recurrent.source(self.shape.kind)
        return (
            f"Counted in the choice of degrees, at rates {source}: "
            f"{self.num_layers} recurrent layers ({self.shape.kind}) beside "
            f"{self.num_attention_layers} with attention. The table is of attention."
        )

    def beside(self, setting: Setting, workload: Workload, hardware: Hardware) -> Beside:
        """What each takes under these degrees and this layout. Raises ValueError for a layout that
        chains can't have."""
        row = Row(
            documents=workload.documents(),
            placement=setting.layout,
            ring=setting.ring_degree,
            ulysses=setting.ulysses_degree,
        )
        shape, degree = self.shape, setting.ulysses_degree
        ways: list[RecurrentWay] = ["states"]
        if states_because(shape.num_heads, shape.num_groups, degree) is None:
            ways.append("heads")
        found = tuple(predict_recurrence(shape, row, way, hardware) for way in ways)
        return Beside(self.num_layers, shape, found, hardware.recurrent.source(shape.kind))


def _seconds(found: RecurrencePrediction, direction: Direction) -> float:
    return found.forward_s if direction is Direction.FORWARD else found.backward_s


def _sent(found: RecurrencePrediction, direction: Direction) -> list[int]:
    forward = direction is Direction.FORWARD
    return [(t.forward if forward else t.backward).bytes for t in found.traffic]
