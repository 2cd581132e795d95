"""Settings and public names that went: each is refused by its name, with the reason."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

GONE_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "max_loss_spike": "A loss that jumps is no reason to skip a step. Clip gradients "
        "(max_grad_norm); skip_bad_steps skips steps that are not finite.",
        **dict.fromkeys(
            ("sample_prompts", "sample_tokens"),
            "Answers to prompts can't be compared. eval_context_steps scores tasks instead, or add "
            "TRL's LogCompletionsCallback in a script of your own. Leave it out.",
        ),
        "ulysses_waves": "Heads are exchanged all at once: in parts they were 0 to 1 % faster at "
        "best, and slower in short rows. Leave it out.",
    }
)
"""Why a setting went and what to do instead, by its name."""

GONE_NAMES: Mapping[str, str] = MappingProxyType(
    {"explain": "Use longctx_patch.compare, or `longctx schedule --plan auto` for what runs"}
)
"""The same for public names of the package."""


def refuse_gone(names: Iterable[str]) -> None:
    """Raise ValueError for the first of these settings that went."""
    for name in names:
        if name in GONE_SETTINGS:
            raise ValueError(f"{name} is no setting any more. {GONE_SETTINGS[name]}")
