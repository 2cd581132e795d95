"""Placement of a packed row: every rank gets the same number of tokens and of allowed pairs.

Attention within documents costs a token as many pairs as it has keys, so runs of equal length cost
unequal time: a rank with a piece of a long document works while the others wait. Keys travel where
a document spans ranks, so `balanced` keeps documents whole, or cuts only the longest, if that
leaves ranks balanced (`whole_documents`). Otherwise it cuts the row into chunks
(`chunked_layouts`).
"""

from longctx_patch.sequence.chunks import chunked_layouts
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout
from longctx_patch.sequence.pairs import LIMIT, imbalance, pairs_of
from longctx_patch.sequence.whole_documents import whole_documents


def balanced(documents: Documents, num_ranks: int) -> Layout:
    """A layout of `num_ranks` ranks with equal shares of the tokens and of the allowed pairs.

    Shares of tokens differ by one at most, and not at all where `num_ranks` divides their number.
    Shares of pairs are within `LIMIT` of the mean. If possible, documents stay whole, except the
    few that fit nowhere; otherwise the layout has the fewest chunks for which one was found. Where
    none was found (ranks hold hardly any tokens), the best candidate is returned. A row of one
    document is placed as `zigzag` does, exactly so on fewer than 100 ranks.

    Each rank's intervals are in the order of the tokens, and ranks in the order of their first
    tokens. The result depends on the arguments alone, so every rank finds the same. For Ulysses,
    split the layout (`Layout.split_each`): Ulysses ranks share their ring rank's pairs by heads.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a layout has 1 rank or more.")
    for share in _shares_of_a_whole_document(documents, num_ranks):
        whole = whole_documents(documents, num_ranks, share)
        if imbalance(documents, whole) <= LIMIT:
            return whole
    candidates = []
    for layout in chunked_layouts(documents, num_ranks):
        candidates.append((imbalance(documents, layout), layout))
        if candidates[-1][0] <= LIMIT:
            break
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _shares_of_a_whole_document(documents: Documents, num_ranks: int) -> list[float]:
    """Limits to try on the pairs of a document that stays whole, as multiples of a rank's share; []
    for a row of one document, which zigzag places."""
    pairs = [pairs_of(length) for length in documents.lengths]
    if len(pairs) < 2:
        return []
    longest = max(pairs) * num_ranks / sum(pairs)
    return [1.0 + LIMIT, 1.0, 0.5] if longest <= 1 + LIMIT else [1.0, 0.5]
