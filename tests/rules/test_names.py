import pytest

from longctx_patch.rules.names import did_you_mean, require_choice

PLANS = ("ring", "zigzag", "zigzag_direct", "double_ring")


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        ("zigzg", "zigzag"),
        ("Ring", "ring"),
        ("ZIGZAG", "zigzag"),
        ("zigzag-direct", "zigzag_direct"),
        ("doublering", "double_ring"),
        (["ring"], "ring"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(value: object, nearest: str) -> None:
    with pytest.raises(ValueError) as caught:
        require_choice("plan", value, PLANS)
    assert str(caught.value) == (
        f"plan={value!r}: choose one of ring, zigzag, zigzag_direct, double_ring. "
        f"Did you mean {nearest!r}?"
    )


@pytest.mark.parametrize("value", ["nonsense", None, 4])
def test_a_name_that_is_near_none_gets_no_guess(value: object) -> None:
    with pytest.raises(ValueError, match=r"choose one of ring, .*double_ring\.$"):
        require_choice("plan", value, iter(PLANS))
    assert did_you_mean(value, PLANS) == ""


def test_a_right_name_passes() -> None:
    require_choice("plan", "ring", PLANS)
