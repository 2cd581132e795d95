"""The picture of `longctx schedule` in a notebook: of what a config runs, and shown by itself."""

from dataclasses import dataclass
from io import BytesIO
from typing import Literal

from longctx_patch.choose.plans import decide
from longctx_patch.cli.pictures import require_matplotlib
from longctx_patch.cli.schedule_report import describe
from longctx_patch.cli.timeline import MAX_RANKS, draw
from longctx_patch.config import LongContextConfig
from longctx_patch.plans import Direction
from longctx_patch.predict.attention.costs import Workload, predict
from longctx_patch.predict.machines import MACHINES


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows where it is the last value of a cell."""

    png: bytes

    def __repr__(self) -> str:
        return f"<picture of {len(self.png)} bytes>"

    def _repr_png_(self) -> bytes:
        """IPython's name for it."""
        return self.png


def draw_schedule(
    config: LongContextConfig,
    workload: Workload,
    direction: Literal["forward", "backward"] = "forward",
) -> Picture:
    """Draw what a config runs in one attention call, on the GPUs of `config.hardware`.

    Raises ValueError without matplotlib, for more ranks than can be drawn, and for a plan or
    degrees that don't fit the workload.

    Example:
        >>> workload = Workload(num_tokens=131072)
        >>> draw_schedule(LongContextConfig(ring_degree=4), workload)  # doctest: +SKIP
    """
    require_matplotlib("draw_schedule")
    if config.sequence_degree > MAX_RANKS:
        raise ValueError(
            f"{config.degrees_in_words} = {config.sequence_degree} ranks: a picture has a row for "
            f"each rank, and more than {MAX_RANKS} can't be read. Use smaller degrees."
        )
    hardware = MACHINES[config.hardware]
    setting = decide(config, workload)
    prediction = predict(setting, Direction(direction), workload, hardware, with_timeline=True)
    file = BytesIO()
    draw(prediction, file, caption=describe(workload, hardware))
    return Picture(file.getvalue())
