"""Which degrees are kept as options ask, and which are refused."""

import pytest

from longctx_patch.choose.degrees import Way
from longctx_patch.cli.degrees import asked_degrees


def test_what_is_given_is_kept() -> None:
    def asked(**given: int) -> tuple[int, Way | None]:
        return asked_degrees(num_ranks=8, **given)

    assert asked(ulysses=2) == asked(ring=4) == (8, Way(2, 4))
    assert asked(ulysses=1, ring=4) == (4, Way(1, 4))
    assert asked(sequence_degree=4, ring=2) == (4, Way(2, 2))
    assert asked(sequence_degree=4) == (4, None)
    assert asked() == (8, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ulysses": 3}, "--ulysses 3 with 8 ranks.*must be 8. Use --ulysses 1 or 2 or 4 or 8"),
        ({"ring": 5}, "--ring 5 with 8 ranks"),
        (
            {"ulysses": 2, "ring": 3},
            r"--ulysses 2 x --ring 3 = 6 ranks per sequence, but 8 .*divide 8: 1, 2, 4, 8",
        ),
        ({"sequence_degree": 3}, "--sequence-degree = 3 ranks per sequence, but 8 process"),
        ({"ulysses": 2, "ring": 2, "sequence_degree": 8}, "= 4, but --sequence-degree is 8"),
        ({"num_nodes": 3}, "--gpus 8 over --nodes 3.*Use --gpus 9"),
    ],
)
def test_degrees_that_do_not_multiply_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked_degrees(num_ranks=8, **given)
