"""A quantity that is the sum of its fields."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Parts:
    def parts(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.parts().values())
