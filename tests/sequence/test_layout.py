import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import (
    Interval,
    Layout,
    LayoutName,
    contiguous,
    length_multiple,
    make_layout,
    zigzag,
)
from longctx_patch.sequence.placement import place

layouts = st.builds(
    make_layout,
    st.sampled_from(["zigzag", "contiguous"]),
    st.integers(0, 60),
    ring=st.integers(1, 6),
    ulysses=st.integers(1, 4),
)


@given(layouts)
def test_every_token_has_one_slot(layout: Layout) -> None:
    positions = torch.cat([layout.positions(rank) for rank in range(layout.num_ranks)])
    assert sorted(positions.tolist()) == list(range(layout.num_tokens))


@given(layouts, st.integers(0, 60), st.integers(0, 60))
def test_places_say_who_holds_which_token(layout: Layout, start: int, stop: int) -> None:
    stop = min(stop, layout.num_tokens)
    held = []
    for rank, slots, tokens in layout.places(Interval(start, max(start, stop))):
        positions = layout.positions(rank).tolist()[slots.start : slots.stop]
        assert positions == list(range(*tokens))
        held += positions
    assert held == list(range(start, stop))


@pytest.mark.parametrize(
    "ranks",
    [
        ((Interval(0, 3),), (Interval(2, 5),)),
        ((Interval(0, 3),), (Interval(4, 6),)),
        ((Interval(0, 6, 2),), (Interval(2, 6, 2),)),
    ],
)
def test_a_token_without_a_slot_or_with_two_is_no_layout(
    ranks: tuple[tuple[Interval, ...], ...],
) -> None:
    with pytest.raises(AssertionError):
        Layout(ranks)


@given(layouts)
def test_unshard_inverts_shard(layout: Layout) -> None:
    x = torch.arange(3 * layout.num_tokens).view(3, layout.num_tokens)
    shards = [layout.shard(x, rank, 1) for rank in range(layout.num_ranks)]
    assert [shard.shape[1] for shard in shards] == list(layout.sizes)
    assert torch.equal(layout.unshard(shards, 1), x)


ZIGZAG = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
CONTIGUOUS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
STRIPED = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize(
    ("name", "lengths", "tokens"),
    [
        ("zigzag", (12,), ZIGZAG),
        ("zigzag", (4, 4, 4), ZIGZAG),
        ("contiguous", (12,), CONTIGUOUS),
        ("striped", (12,), STRIPED),
        ("balanced", (12,), ZIGZAG),
        ("balanced", (4, 4, 4), CONTIGUOUS),  # whole documents
    ],
)
def test_each_name_places_tokens_as_it_says(
    name: LayoutName, lengths: tuple[int, ...], tokens: list[list[int]]
) -> None:
    layout = place(name, Documents(lengths, 12), ring=3)
    assert [layout.positions(rank).tolist() for rank in range(3)] == tokens


def test_a_name_of_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout='zigzg': choose .* Did you mean 'zigzag'\?"):
        place("zigzg", Documents.one(12), ring=3)


def test_ulysses_cuts_the_slots_of_a_ring_rank() -> None:
    layout = zigzag(16, 2).split_each(2)
    assert layout.positions(0).tolist() == [0, 1, 2, 3]
    assert layout.positions(1).tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (3, 1), (1, 4), (2, 2), (4, 3)])
def test_multiples_give_equal_shares(name: LayoutName, ring: int, ulysses: int) -> None:
    length = 97 * length_multiple(name, ring=ring, ulysses=ulysses)
    row = Documents((3, length // 2, 1, 1), length)
    assert len(set(place(name, row, ring=ring, ulysses=ulysses).sizes)) == 1


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens along dim 0, but the layout places 8"):
        contiguous(8, 2).shard(torch.zeros(9), 0, 0)


@given(*(st.integers(0, 6) for _ in range(4)))
def test_a_range_is_what_it_shares_with_another_and_what_is_without(
    a: int, b: int, c: int, d: int
) -> None:
    mine, other = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    apart = [token for rest in mine.without(other) for token in range(rest.start, rest.stop)]
    assert apart == sorted(set(range(*mine[:2])) - set(range(*other[:2])))
    assert all(rest.size for rest in mine.without(other))
