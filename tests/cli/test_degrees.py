"""Which degrees are chosen, and which are refused."""

import pytest

from longctx_patch.cli.degrees import choose_degrees


@pytest.mark.parametrize(
    ("gpus", "nodes", "kv_heads", "ulysses", "ring"),
    [
        (1, 1, 8, 1, 1),
        (4, 1, 8, 4, 1),
        (8, 1, 2, 2, 4),  # more would send key-value heads twice
        (16, 2, 8, 8, 2),
        (16, 4, 8, 4, 4),  # Ulysses stays inside a node
        (6, 1, 8, 2, 3),
        (3, 1, 8, 1, 3),
        (5, 1, 10, 5, 1),
    ],
)
def test_default_is_ulysses_without_repeated_heads_then_ring(
    gpus: int, nodes: int, kv_heads: int, ulysses: int, ring: int
) -> None:
    choice = choose_degrees(num_ranks=gpus, num_nodes=nodes, num_kv_heads=kv_heads)
    assert (choice.ulysses, choice.ring) == (ulysses, ring)
    assert choice.reason


def test_what_is_given_is_kept() -> None:
    def chosen(**given: int) -> tuple[int, int]:
        choice = choose_degrees(num_ranks=8, num_kv_heads=8, **given)
        return choice.ulysses, choice.ring

    assert chosen(ulysses=2) == (2, 4)
    assert chosen(ring=4) == (2, 4)
    assert chosen(ulysses=1, ring=4) == (1, 4)
    assert chosen(sequence_degree=4) == (4, 1)
    assert chosen(sequence_degree=4, ring=2) == (2, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ulysses": 3}, "--ulysses 3 with 8 ranks.*must be 8. Use --ulysses 1 or 2 or 4 or 8"),
        ({"ring": 5}, "--ring 5 with 8 ranks"),
        (
            {"ulysses": 2, "ring": 3},
            r"6 ranks.*--ulysses 2 x --ring 3.*--gpus 8.*one of 1, 2, 4, 8",
        ),
        ({"sequence_degree": 3}, "3 ranks per sequence on --gpus 8"),
        ({"ulysses": 2, "ring": 2, "sequence_degree": 8}, "= 4, but --sequence-degree is 8"),
        ({"num_nodes": 3}, "--gpus 8 over --nodes 3.*Use --gpus 9"),
        ({"ulysses": 0}, "--ulysses 0: a number of ranks, 1 or more"),
    ],
)
def test_degrees_that_do_not_multiply_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_degrees(num_ranks=8, num_kv_heads=8, **given)
