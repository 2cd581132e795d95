"""Draw the pictures of docs/explanation/plans.md: `python docs/draw.py`, or `make pictures`.

Each is what `longctx schedule --out` draws, at a lower resolution.
"""

import sys
from pathlib import Path

from longctx_patch.cli.schedule import make_setting, read_hardware, read_workload
from longctx_patch.cli.schedule_report import describe
from longctx_patch.cli.timeline import check_drawable, draw
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import predict

FOLDER = Path(__file__).parent / "schedules"
DPI = 100
NUM_RANKS = 8
SIZES = {"heads": 32, "kv_heads": 8, "head_dim": 128, "seq_len": 131072, "batch": 1}
BOTH = (Direction.FORWARD, Direction.BACKWARD)
PICTURES = {
    "zigzag": BOTH,
    "zigzag_direct": BOTH,
    "ring": BOTH[:1],
    "striped": BOTH[:1],
    "distflash": BOTH[:1],
    "distflash_balanced": BOTH,
    "allgather": BOTH,
    "burst": BOTH[1:],
    "double_ring": BOTH,
    "ulysses": BOTH[:1],
}
RANKS_PER_NODE = {"double_ring": 4}
"""Two nodes; the other pictures are of one."""


def main() -> None:
    """Draw all of them."""
    workload = read_workload(**SIZES)
    for plan, directions in PICTURES.items():
        hardware = read_hardware("h100", RANKS_PER_NODE.get(plan))
        setting = make_setting(plan, NUM_RANKS, None, workload, hardware)
        for direction in directions:
            path = FOLDER / f"{plan}_{direction.value}.png"
            check_drawable(path, NUM_RANKS)
            prediction = predict(setting, direction, workload, hardware, with_timeline=True)
            draw(prediction, path, caption=describe(workload, hardware), dpi=DPI)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
