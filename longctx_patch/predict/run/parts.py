"""A quantity that is the sum of its fields."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Named parts that add up to a total."""

    def parts(self) -> dict[str, float]:
        """Each part by its name."""
        return asdict(self)

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts().values())
