"""Messages and bytes that a plan sends, in closed form; transports count the real ones."""

from dataclasses import dataclass

from longctx_patch.plans.types import Block, Operand, Plan


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes, besides the number of tokens, that decide how many bytes a block has."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize_bytes: int
    """Bytes of one number in the model's dtype."""
    latent_dim: int = 0
    """Numbers that a token's latent travels as, in place of keys and values; 0: heads travel."""
    expansion: int = 0
    """Weights that turn one token's latent into keys and values of all heads, where latents travel;
    0: it is not known."""

    @property
    def sum_itemsize_bytes(self) -> int:
        """Bytes of one number in partial sums, which are float32 or wider."""
        return max(4, self.itemsize_bytes)

    @property
    def kv_dim(self) -> int:
        """Numbers that one token's key and value travel as, for each key-value head."""
        return self.latent_dim or 2 * self.head_dim

    def block_bytes(self, block: Block) -> int:
        """Size of one block on the wire."""
        model, wide = self.itemsize_bytes, self.sum_itemsize_bytes
        heads = block.heads.range(self.num_heads, self.num_kv_heads).size
        kv_heads = block.heads.range(self.num_kv_heads, self.num_kv_heads).size
        q, kv = heads * self.head_dim, kv_heads * self.kv_dim
        per_token = {
            Operand.KV: kv * model,
            Operand.Q: q * model,
            Operand.Q_BACKWARD: 2 * q * model + 2 * heads * wide,
            Operand.OUT: q * model + heads * wide,
            Operand.DQ: q * model,
            Operand.DKV: kv * model,
            Operand.DQ_SUM: q * wide,
            Operand.DKV_SUM: kv * wide,
        }[block.operand]
        return self.batch * block.rows.size * per_token


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that one rank sends."""

    messages: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.messages:,} messages with {self.bytes:,} bytes"

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def plan_traffic(plan: Plan, shape: AttentionShape) -> tuple[Traffic, ...]:
    """The messages and bytes that each rank sends when the plan runs once."""
    totals = [Traffic()] * plan.num_ranks
    for step in plan.steps:
        for transfer in step.transfers:
            sent = Traffic(1, shape.block_bytes(transfer.block))
            totals[transfer.source] += sent
    return tuple(totals)
