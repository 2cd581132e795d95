"""One run of a recurrent layer on one rank: its chain, and what its exchanges will send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from longctx_patch.engine.chain.hand_over import Exchange
from longctx_patch.plans.chain import Chain, ChainTraffic, Needs, make_chain
from longctx_patch.plans.verify.chain_proof import verify_chain, verify_needs
from longctx_patch.sequence.documents import Documents
from longctx_patch.sequence.layout import Layout
from longctx_patch.transport import Transport


@lru_cache(maxsize=32)
def checked_chain(layout: Layout, documents: Documents) -> Chain:
    """The verified chain of a row."""
    chain = make_chain(layout, documents)
    verify_chain(chain, layout, documents)
    verify_needs(chain, chain.states, None)
    return chain


@lru_cache(maxsize=32)
def checked_tails(chain: Chain, num_tokens: int) -> Needs:
    """The verified chain of convolutions that need `num_tokens` tokens before each."""
    needs = chain.tails(num_tokens)
    verify_needs(chain, needs, num_tokens)
    return needs


@dataclass
class ChainRun:
    """Its layer's exchanges, one after the other."""

    chain: Chain
    transport: Transport
    planned: ChainTraffic = field(default_factory=ChainTraffic)
    """What this rank sends in the exchanges so far, by the chain alone."""

    @property
    def rank(self) -> int:
        return self.transport.group_rank

    def exchange(
        self, needs: Needs, sizes: Mapping[int, int], dtype: torch.dtype, *, learns: bool
    ) -> Exchange:
        """The next exchange, of items with so many numbers each; `learns` says whether backward
        comes to it."""

        def num_bytes(number: int) -> int:
            return sizes[number] * dtype.itemsize

        planned = self.chain.traffic(needs, num_bytes, self.rank)
        self.planned = self.planned.plus(planned if learns else planned.without_backward())
        is_kept = self.chain.is_kept(needs, num_bytes)
        return Exchange(self.chain, needs, self.transport, sizes, dtype, is_kept)
