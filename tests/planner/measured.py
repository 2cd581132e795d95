"""What steps took on NVIDIA H200s of one host (docs/performance.md), beside what is predicted.

`python -m tests.planner.measured` prints the table of docs/planner.md.
"""

from typing import NamedTuple

from longctx_patch.memory import LayerPolicy
from longctx_patch.planner import Result
from longctx_patch.planner.machine import GIB
from longctx_patch.planner.search import result_of
from tests.planner.jobs import llama_job


class Measured(NamedTuple):
    """Llama-3.1-8B's shape with 8 layers, AdamW, Ulysses over all GPUs, flash-attn 4."""

    gpus: int
    tokens: int
    checkpoint: LayerPolicy
    fused: bool
    """Whether Liger Kernel's layers ran."""
    peak_gib: float
    seconds: float

    def predicted(self) -> Result:
        job = llama_job(
            f"{self.gpus}xH200",
            self.tokens,
            num_layers=8,
            fused_layers=self.fused,
            fsdp=self.gpus > 1,
        )
        return result_of(job, ulysses=self.gpus, ring=1, checkpoint=self.checkpoint)

    def line(self) -> str:
        """Of the table in docs/planner.md."""
        result = self.predicted()
        peak, seconds = result.memory.total / GIB, result.time.total
        layers = "Liger" if self.fused else "stock"
        return (
            f"| {self.gpus} | {self.tokens:,} | `{self.checkpoint}` | {layers} "
            f"| {peak:.1f} | {self.peak_gib:.1f} | {peak / self.peak_gib - 1:+.1%} "
            f"| {seconds:.3f} | {self.seconds:.3f} | {seconds / self.seconds - 1:+.1%} |"
        )


MEASURED = (
    Measured(1, 32768, "none", True, 56.7, 1.154),
    Measured(1, 32768, "none", False, 72.1, 1.266),
    Measured(1, 32768, "attention", True, 26.7, 1.287),
    Measured(4, 32768, "none", True, 23.1, 0.340),
    Measured(4, 131072, "none", True, 51.0, 2.429),
    Measured(2, 32768, "none", True, 40.2, 0.634),
    Measured(2, 65536, "none", True, 58.7, 1.631),
    Measured(2, 131072, "none", True, 95.9, 4.847),
    Measured(2, 32768, "attention", True, 24.5, 0.711),
    Measured(2, 65536, "attention", True, 28.5, 1.777),
    Measured(2, 32768, "offload", True, 24.5, 0.712),
    Measured(2, 65536, "offload", True, 27.3, 1.781),
)

if __name__ == "__main__":
    print("\n".join(row.line() for row in MEASURED))
