import pytest

from longctx_patch import LongContextConfig


def test_degree_is_the_product() -> None:
    assert LongContextConfig(ulysses_degree=2, ring_degree=3).sequence_degree == 6


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_degrees_are_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=r"ring_degree=.*whole number.*ring_degree=1"):
        LongContextConfig(ring_degree=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["layout", "plan", "checkpoint"])
def test_choices_are_listed(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='nonsense': choose one of"):
        LongContextConfig(**{name: "nonsense"})  # type: ignore[arg-type]


def test_a_plan_wants_its_layout() -> None:
    with pytest.raises(ValueError, match=r"plan='ring' with layout='zigzag'.*layout='contiguous'"):
        LongContextConfig(plan="ring")
    assert LongContextConfig(plan="ring", layout="contiguous").plan == "ring"
