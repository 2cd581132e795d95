"""The layout that a name stands for, for the documents that a row holds."""

from functools import lru_cache

from longctx_patch.sequence.balance import balanced
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout, LayoutName, make_layout


@lru_cache(maxsize=256)
def place(name: LayoutName, documents: Documents, *, ring: int, ulysses: int = 1) -> Layout:
    """The layout of a (ring x Ulysses) group; Ulysses ranks are consecutive.

    A balanced row of one document is the zigzag one; without a ring there is nothing to balance.
    """
    if name == "balanced" and ring > 1 and not documents.is_one:
        return balanced(documents, ring).split_each(ulysses)
    plain = "zigzag" if name == "balanced" else name
    return make_layout(plain, documents.num_tokens, ring=ring, ulysses=ulysses)
