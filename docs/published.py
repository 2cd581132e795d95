"""Write the table of docs/published.md: `python docs/published.py`, or `make pictures`.

Every simulated number is the library's cost model, on a machine as its source describes it. No
figure is fitted to a published ratio; what comes from the sources are the speed of one GPU's
kernels and of links. (How messages slow kernels down was changed after a first comparison: see the
page.) When a number changes, read again what the page says about it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from longctx_patch.config import LAYOUTS_OF_PLAN
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Prediction, Setting, Workload, predict
from longctx_patch.predict.hardware import PRESETS, Hardware, KernelRate, Link
from longctx_patch.sequence.layout import Interval
from longctx_patch.sequence.regions import CAUSAL, Piece

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/published.py -->", "<!-- end of the table -->"
COLUMNS = ("", "what", "setup", "source", "published", "simulated", "without slowdown")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
PERCENT = ".1%"
K = 1024


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One layer's attention, causal, on the ranks of a machine."""

    machine: str
    """GPUs as the source calls them."""
    hardware: Hardware
    ranks: int
    workload: Workload
    directions: tuple[Direction, ...] = (FORWARD, BACKWARD)

    def __str__(self) -> str:
        load = self.workload
        directions = " and ".join(direction.value for direction in self.directions)
        return (
            f"{self.ranks} {self.machine}, {load.num_tokens // K}K tokens, "
            f"{load.num_heads}/{load.num_kv_heads} heads, {directions}"
        )

    def only(self, direction: Direction) -> "Setup":
        return replace(self, directions=(direction,))

    def at(self, num_tokens: int) -> "Setup":
        """The same with another total length."""
        return replace(self, workload=replace(self.workload, num_tokens=num_tokens))

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "Setup":
        load = replace(self.workload, num_heads=num_heads, num_kv_heads=num_kv_heads)
        return replace(self, workload=load)

    def with_recompute(self) -> "Setup":
        """Forward runs once more before backward."""
        return replace(self, directions=(FORWARD, *self.directions))

    def without_slowdown(self) -> "Setup":
        """Kernels lose nothing to the messages that travel beside them."""
        return replace(self, hardware=replace(self.hardware, overlap_slowdown=0.0))

    def seconds(self, plan: str) -> float:
        """Of all directions, one after the other."""
        return sum(prediction.makespan_s for prediction in self._predictions(plan))

    def exposed_seconds(self, plan: str) -> float:
        """What `seconds` would lose if messages took no time."""
        return sum(prediction.exposed_communication_s for prediction in self._predictions(plan))

    def bytes_sent(self, plan: str) -> int:
        """By all ranks together."""
        return sum(sum(prediction.bytes_sent_per_rank) for prediction in self._predictions(plan))

    def one_gpu_seconds(self) -> float:
        """One kernel call over the whole sequence for each direction."""
        return sum(
            causal_seconds(self.hardware, direction, self.workload) for direction in self.directions
        )

    def ideal_seconds(self) -> float:
        """A rank's share of the FLOPs at the speed of one GPU on a rank's tokens."""
        own = self.at(self.workload.num_tokens // self.ranks)
        return self.ranks * own.one_gpu_seconds()

    def _predictions(self, plan: str) -> list[Prediction]:
        """`ulysses` is a plan here too."""
        ulysses = plan == "ulysses"
        setting = Setting(
            plan="zigzag" if ulysses else plan,
            layout="zigzag" if ulysses else LAYOUTS_OF_PLAN[plan][0],
            ulysses_degree=self.ranks if ulysses else 1,
            ring_degree=1 if ulysses else self.ranks,
            ranks_per_node=self.hardware.gpus_per_node,
        )
        return [predict(setting, d, self.workload, self.hardware) for d in self.directions]


Ratio = Callable[[Setup], float]


@dataclass(frozen=True)
class Comparison:
    """A published number, and the function that computes ours for the same setup."""

    key: str
    claim: str
    source: str
    """Where in the paper that the key's letter stands for."""
    setup: Setup
    published: float | None
    """None where the source has no such number."""
    ratio: Ratio
    unit: str = ".2f"
    """How the table writes the numbers."""

    def row(self) -> str:
        """Its line of the table."""
        simulated = (self.ratio(self.setup), self.ratio(self.setup.without_slowdown()))
        published = "none" if self.published is None else format(self.published, self.unit)
        numbers = (published, *(format(ratio, self.unit) for ratio in simulated))
        return line(self.key, self.claim, str(self.setup), self.source, *numbers)


def faster(plan: str, than: str) -> Ratio:
    """How many times as fast."""
    return lambda setup: setup.seconds(than) / setup.seconds(plan)


def over_one_gpu(plan: str) -> Ratio:
    """The speed-up that all ranks bring together."""
    return lambda setup: setup.one_gpu_seconds() / setup.seconds(plan)


def of_ideal(plan: str) -> Ratio:
    """Speed as a share of the ideal one."""
    return lambda setup: setup.ideal_seconds() / setup.seconds(plan)


def bytes_of(plan: str, over: str) -> Ratio:
    """Bytes sent, over those of another plan."""
    return lambda setup: setup.bytes_sent(plan) / setup.bytes_sent(over)


def waiting(plan: str) -> Ratio:
    """Time, over the time that it would take without communication."""
    return lambda s: s.seconds(plan) / (s.seconds(plan) - s.exposed_seconds(plan))


def slower_than_with(num_heads: int, num_kv_heads: int, plan: str) -> Ratio:
    """Time, over the time with these heads."""
    return lambda s: s.seconds(plan) / s.with_heads(num_heads, num_kv_heads).seconds(plan)


def saved_recompute(plan: str, rest_s: float = 0.0) -> Ratio:
    """A step that runs attention's forward twice, over one that keeps its output.

    `rest_s` is the forward of all else in the layer. It runs twice in both steps, and its backward
    takes twice as long as that: a product for the input and one for the weights.
    """
    rest_of_step_s = (1 + 1 + 2) * rest_s

    def ratio(setup: Setup) -> float:
        twice_s = setup.with_recompute().seconds(plan)
        return (twice_s + rest_of_step_s) / (setup.seconds(plan) + rest_of_step_s)

    return ratio


def saved_recompute_over(plan: str, other: str) -> Ratio:
    """A step of `other` that runs attention's forward twice, over one of `plan` that doesn't."""
    return lambda setup: setup.with_recompute().seconds(other) / setup.seconds(plan)


def causal_seconds(hardware: Hardware, direction: Direction, workload: Workload) -> float:
    """One causal kernel call over all tokens."""
    tokens = Interval(0, workload.num_tokens)
    return hardware.kernel_seconds(
        direction,
        [Piece(tokens, tokens, CAUSAL)],
        batch=workload.batch,
        num_heads=workload.num_heads,
        head_dim=workload.head_dim,
    )


def with_kernels(
    hardware: Hardware, workload: Workload, *, forward_s: float, backward_s: float | None = None
) -> Hardware:
    """The same machine with kernels whose causal call over all tokens takes these times.

    Without `backward_s`, backward changes by the factor by which forward does.
    """
    forward = forward_s / causal_seconds(hardware, FORWARD, workload)
    backward = forward
    if backward_s is not None:
        backward = backward_s / causal_seconds(hardware, BACKWARD, workload)
    return replace(
        hardware,
        forward_full=_slower(hardware.forward_full, forward),
        forward_causal=_slower(hardware.forward_causal, forward),
        backward_full=_slower(hardware.backward_full, backward),
        backward_causal=_slower(hardware.backward_causal, backward),
    )


def _slower(rate: KernelRate, factor: float) -> KernelRate:
    return KernelRate(rate.peak_flops / factor, rate.half_tokens, rate.fixed_s * factor)


def with_nvlink(hardware: Hardware, share: float) -> Hardware:
    """The same machine with a share of the bandwidth inside its nodes."""
    link = Link(hardware.intra_node.bandwidth * share, hardware.intra_node.latency_s)
    return replace(hardware, intra_node=link)


def load(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int = 128) -> Workload:
    """Shorter, for the tables below."""
    return Workload(
        num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


A100, H100 = PRESETS["a100"], PRESETS["h100"]

# Figure 7 of the paper, LLaMA-7B on one A100: attention of a layer takes 233.87 ms forward for 64K
# tokens; all else in the layer 10.5 ms for 8K and 47.22 ms for 32K.
D_A100 = with_kernels(A100, load(64 * K, 32, 32), forward_s=0.23387)
D_REST_8K_S, D_REST_32K_S = 0.0105, 0.04722
# 100 Gbit/s InfiniBand; the page says why we take one such adapter for each GPU.
D_PAIR = replace(D_A100, inter_node=Link(12.5e9, A100.inter_node.latency_s))
D_NODE = Setup(machine="A100", hardware=D_A100, ranks=8, workload=load(256 * K, 32, 32))
D_NODES = Setup(
    machine="A100 in 2 nodes", hardware=D_PAIR, ranks=16, workload=load(512 * K, 32, 32)
)

# Half of the 3B model's 32 heads of 100, on one of the two tensor-parallel halves of the machine.
S_A100 = Setup(machine="A100", hardware=A100, ranks=4, workload=load(256 * K, 16, 16, 100))
S_TPU = replace(S_A100, machine="A100 for 16 TPUv4", ranks=8, workload=load(768 * K, 16, 16, 100))

# Calls per second of one GPU in the README: 591.5 (H800) and 373.4 (A100) forward, 154.7 and 94.7
# forward and backward. NVLink of the H800: 400 of the H100's 900 GB/s.
Z_ONE_RANK = load(8 * K, 32, 8)
Z_H800 = Setup(
    machine="H800",
    hardware=with_kernels(
        with_nvlink(H100, 400 / 900),
        Z_ONE_RANK,
        forward_s=1 / 591.5,
        backward_s=1 / 154.7 - 1 / 591.5,
    ),
    ranks=8,
    workload=load(64 * K, 32, 8),
)
Z_A100 = replace(
    Z_H800,
    machine="A100",
    hardware=with_kernels(A100, Z_ONE_RANK, forward_s=1 / 373.4, backward_s=1 / 94.7 - 1 / 373.4),
)

B_NODE = Setup(machine="A100", hardware=A100, ranks=8, workload=load(128 * K, 32, 32))

# NVLink of the A800: 400 of the A100's 600 GB/s.
L_NODES = Setup(
    machine="A800 in 4 nodes",
    hardware=with_nvlink(A100, 400 / 600),
    ranks=32,
    workload=load(128 * K, 40, 40),
)

# fmt: off
COMPARISONS = (
    Comparison("D1", "`ring`, speed-up over one GPU", "section 4.5", D_NODE.only(FORWARD), 4.5,
               over_one_gpu("ring")),
    Comparison("D2", "`distflash`, speed-up over one GPU", "section 4.5", D_NODE.only(FORWARD), 7.5,
               over_one_gpu("distflash")),
    Comparison("D3", "`distflash` over `ring`", "section 4.3", D_NODE.only(FORWARD), 1.67,
               faster("distflash", than="ring")),
    Comparison("D4", "`distflash_balanced` over `ring`", "", D_NODE.only(FORWARD), None,
               faster("distflash_balanced", than="ring")),
    Comparison("D5", "`distflash`, time over that without messages", "section 4.5",
               D_NODES.at(128 * K).only(FORWARD), 1.44, waiting("distflash")),
    Comparison("D6", "the same", "section 4.5", D_NODES.at(256 * K).only(FORWARD), 1.08,
               waiting("distflash")),
    Comparison("D7", "the same", "section 4.5", D_NODES.only(FORWARD), 1.01, waiting("distflash")),
    Comparison("D8", "`distflash`, output kept over recomputed", "table 5", D_NODE.at(64 * K), 1.16,
               saved_recompute("distflash")),
    Comparison("D9", "the same, with the rest of the layer", "table 5", D_NODE.at(64 * K), 1.16,
               saved_recompute("distflash", D_REST_8K_S)),
    Comparison("D10", "`distflash`, output kept over recomputed", "table 5", D_NODE, 1.31,
               saved_recompute("distflash")),
    Comparison("D11", "the same, with the rest of the layer", "table 5", D_NODE, 1.31,
               saved_recompute("distflash", D_REST_32K_S)),
    Comparison("D12", "`distflash`, time over that with 8 key-value heads", "table 1",
               D_NODES.at(128 * K), 1.31, slower_than_with(32, 8, "distflash")),
    Comparison("D13", "the same", "table 1", D_NODES, 1.04, slower_than_with(32, 8, "distflash")),
    Comparison("D14", "`ulysses`, time over that with 32 heads", "table 4",
               D_NODES.with_heads(33, 33), 1.51, slower_than_with(32, 32, "ulysses")),
    Comparison("D15", "`distflash`, time over that with 32 heads", "table 4",
               D_NODES.with_heads(33, 33), 1.01, slower_than_with(32, 32, "distflash")),
    Comparison("D16", "`distflash` over `ulysses` with recompute", "table 4", D_NODES, 1.26,
               saved_recompute_over("distflash", "ulysses")),
    Comparison("D17", "the same", "table 4", D_NODES.with_heads(33, 33), 1.88,
               saved_recompute_over("distflash", "ulysses")),
    Comparison("S1", "`striped` over `ring`", "table 3", S_A100, 1.45,
               faster("striped", than="ring")),
    Comparison("S2", "the same", "table 4", S_TPU, 1.65, faster("striped", than="ring")),
    Comparison("Z1", "`ring`, share of the ideal", "README", Z_H800, 0.539, of_ideal("ring"),
               PERCENT),
    Comparison("Z2", "`striped`, the same", "README", Z_H800, 0.829, of_ideal("striped"), PERCENT),
    Comparison("Z3", "`zigzag`, the same", "README", Z_H800, 0.902, of_ideal("zigzag"), PERCENT),
    Comparison("Z4", "`ring`, the same", "README", Z_A100, 0.525, of_ideal("ring"), PERCENT),
    Comparison("Z5", "`striped`, the same", "README", Z_A100, 0.826, of_ideal("striped"), PERCENT),
    Comparison("Z6", "`zigzag`, the same", "README", Z_A100, 0.898, of_ideal("zigzag"), PERCENT),
    Comparison("B1", "`burst`, bytes over those of `zigzag`", "table 1", B_NODE.only(BACKWARD), 0.5,
               bytes_of("burst", over="zigzag")),
    Comparison("B2", "the same", "table 1", B_NODE, 5 / 8, bytes_of("burst", over="zigzag")),
    Comparison("B3", "the same", "", B_NODE.with_heads(32, 8).only(BACKWARD), None,
               bytes_of("burst", over="zigzag")),
    Comparison("L1", "`double_ring` over `zigzag`", "kernel_perf.csv", L_NODES, 99.11 / 53.10,
               faster("double_ring", than="zigzag")),
    Comparison("L2", "the same", "kernel_perf.csv", L_NODES.at(256 * K), 145.39 / 104.59,
               faster("double_ring", than="zigzag")),
)
# fmt: on


def line(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """All comparisons."""
    rule = line(*("---" if i < 4 else "--:" for i in range(len(COLUMNS))))
    return "\n".join((line(*COLUMNS), rule, *(comparison.row() for comparison in COMPARISONS)))


def with_table(page: str, new: str) -> str:
    """The page with another table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{PAGE.name} has not both marks: the table stands between {BEGIN!r} and {END!r}. "
            "Put each on a line of its own."
        )
    return f"{before}{begin}\n{new}\n{end}{after}"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
