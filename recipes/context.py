"""The length that a run aims at: of its rows, of its context, and the RoPE that reaches it."""

# ruff: noqa: RUF009  # setting() returns a dataclasses.field, which ruff cannot see
import dataclasses
import json
from pathlib import Path
from typing import get_args

from transformers import PreTrainedConfig

from longctx_patch.families.rope import scale_rope
from longctx_patch.families.rope_facts import RopeKind
from longctx_patch.recipes.settings_file import setting
from longctx_patch.rules.names import require_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How long rows are, and the context that RoPE is scaled for."""

    seq_len: int = setting("tokens per row, over all ranks together", default=0)
    context: int = setting(
        "tokens that the trained model is to reach, which rows may be shorter than; 0: seq_len",
        default=0,
    )
    rope: RopeKind = setting("RoPE scaling that reaches the context", default="none")
    rope_theta: float | None = setting("the larger base of theta, if not by its rule", default=None)
    rope_factor: float | None = setting("factor of the scaling, if not the ratio", default=None)
    rope_factors: list[float] = setting(
        "longrope's factors, one for each frequency of a head", default=[]
    )

    @property
    def target_length(self) -> int:
        """The tokens that RoPE is to reach."""
        return self.context or self.seq_len

    def scaled(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """A copy of the model's config whose RoPE reaches the context; ValueError as `scale_rope`
        has it."""
        return scale_rope(
            config,
            kind=self.rope,
            target_length=self.target_length,
            factor=self.rope_factor,
            theta=self.rope_theta,
            factors=self.rope_factors or None,
        )

    def check_lengths(self) -> None:
        """Raise ValueError for lengths that can't be."""
        if self.seq_len < 2:
            raise ValueError(
                f"seq_len={self.seq_len}: a row needs 2 tokens or more, one to read and one to "
                "predict. Give --seq-len, for example --seq-len 32768."
            )
        if self.context and self.context < self.seq_len:
            raise ValueError(
                f"context={self.context} with seq_len={self.seq_len}: rows would be longer than "
                f"the context that they are trained for. Give --context {self.seq_len} or more, or "
                "leave it out."
            )
        require_choice("rope", self.rope, get_args(RopeKind))


def read_factors(file: Path | None) -> list[float]:
    """LongRoPE's factors of a JSON file: a list of numbers; none without a file."""
    if file is None:
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--rope-factors {file}: it can't be read ({error}).") from error
    if not isinstance(found, list) or not all(type(each) in (int, float) for each in found):
        raise ValueError(
            f"--rope-factors {file}: it is no JSON list of numbers. Give one for each frequency, "
            "such as the long_factor in a published config.json."
        )
    return [float(each) for each in found]
