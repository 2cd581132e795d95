"""The layout of a row: the placement that a config names, for the documents that the row holds."""

from functools import lru_cache

from longctx_patch.config import LayoutName, LongContextConfig
from longctx_patch.sequence.balance import balanced, balanced_multiple
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, length_multiple, make_layout


def placement_of(config: LongContextConfig, documents: Documents) -> LayoutName:
    """The placement that a config has for a row."""
    return config.placement if documents.is_one else config.packed_placement


def layout_of(config: LongContextConfig, documents: Documents) -> Layout:
    """Where all ranks of a config's group have the tokens of a row."""
    return place(
        placement_of(config, documents),
        documents,
        ring=config.ring_degree,
        ulysses=config.ulysses_degree,
    )


@lru_cache(maxsize=256)
def place(name: LayoutName, documents: Documents, *, ring: int, ulysses: int = 1) -> Layout:
    """The layout of a (ring x Ulysses) group; Ulysses ranks are consecutive.

    A balanced row of one document is the zigzag one; without a ring there is nothing to balance.
    """
    if name == "balanced" and ring > 1 and not documents.is_one:
        return balanced(documents, ring).split_each(ulysses)
    plain = "zigzag" if name == "balanced" else name
    return make_layout(plain, documents.num_tokens, ring=ring, ulysses=ulysses)


def padding_multiple(config: LongContextConfig, *, packed: bool) -> int:
    """Lengths that are a multiple of this give every rank the same number of tokens."""
    name = config.packed_placement if packed else config.placement
    if name == "balanced":
        return balanced_multiple(ring=config.ring_degree, ulysses=config.ulysses_degree)
    return length_multiple(name, ring=config.ring_degree, ulysses=config.ulysses_degree)
