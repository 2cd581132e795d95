"""Train Hugging Face models on very long sequences, with the numbers one GPU would give.

Names load at first use, so importing the package costs nothing. `attention` and its dependencies
need torch alone; `patch` and all that belongs to it also need transformers. `longctx_patch.masks`
is a module: its functions make a `Mask`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx_patch.config import LongContextConfig
    from longctx_patch.data import SequenceShardCollator, pack_rows
    from longctx_patch.engine.attention import attention
    from longctx_patch.engine.groups import (
        SequenceGroup,
        make_sequence_group,
        virtual_group,
        world_place,
    )
    from longctx_patch.evaluation.context_evaluation import ContextEvaluation, evaluate_context
    from longctx_patch.evaluation.scores import ContextScores, compare_scores
    from longctx_patch.families.checks import UnsupportedModelError
    from longctx_patch.families.rope import scale_rope
    from longctx_patch.health.agreement import model_facts, require_agreement
    from longctx_patch.health.finite import BadStepError, FiniteSteps, StepHistory, StepNumbers
    from longctx_patch.health.pace import PaceCheck
    from longctx_patch.health.progress import TimeLimits
    from longctx_patch.health.watchdog import Watchdog
    from longctx_patch.health.weights import check_weights
    from longctx_patch.hf.handle import PatchHandle
    from longctx_patch.hf.layers.fused_layers import (
        choose_fused_layers,
        fuse_layers,
        require_fused_layers,
    )
    from longctx_patch.hf.patching import patch
    from longctx_patch.hf.preflight import WillNotFit, preflight
    from longctx_patch.hf.sentinel import DriftError, Sentinel
    from longctx_patch.loss.law import count_valid_tokens
    from longctx_patch.planner.attention_cost import Workload
    from longctx_patch.planner.compare import compare
    from longctx_patch.plugin import (
        SequenceParallelismConfig,
        accelerate_yaml,
        close_accelerator,
        make_accelerator,
        states_on_host,
    )
    from longctx_patch.sequence import masks
    from longctx_patch.sequence.documents import Documents
    from longctx_patch.sequence.masks import Mask
    from longctx_patch.trainer import (
        LongContextTrainer,
        LongContextTrainerMixin,
        TrainerParallelism,
        trainer_parallelism,
    )
    from longctx_patch.trainer.context_scores import ContextEvaluationCallback
    from longctx_patch.transport import run_virtual_ranks
    from longctx_patch.transport.meeting import SequenceParallelismError
    from longctx_patch.verification import (
        all_configs,
        run_processes,
        verify,
        verify_on_virtual_ranks,
    )

__version__ = "0.1.0"

_NAMES_IN = {
    "planner.compare": ("compare",),
    "config": ("LongContextConfig",),
    "data": ("SequenceShardCollator", "pack_rows"),
    "engine.groups": ("SequenceGroup", "make_sequence_group", "virtual_group", "world_place"),
    "evaluation.context_evaluation": ("ContextEvaluation", "evaluate_context"),
    "evaluation.scores": ("ContextScores", "compare_scores"),
    "health.agreement": ("model_facts", "require_agreement"),
    "health.finite": ("BadStepError", "FiniteSteps", "StepHistory", "StepNumbers"),
    "health.pace": ("PaceCheck",),
    "hf.sentinel": ("DriftError", "Sentinel"),
    "health.weights": ("check_weights",),
    "hf.layers.fused_layers": ("choose_fused_layers", "fuse_layers", "require_fused_layers"),
    "families.checks": ("UnsupportedModelError",),
    "families.rope": ("scale_rope",),
    "health.progress": ("TimeLimits",),
    "health.watchdog": ("Watchdog",),
    "hf.handle": ("PatchHandle",),
    "hf.patching": ("patch",),
    "hf.preflight": ("WillNotFit", "preflight"),
    "loss.law": ("count_valid_tokens",),
    "engine.attention": ("attention",),
    "plugin": (
        "SequenceParallelismConfig",
        "accelerate_yaml",
        "close_accelerator",
        "make_accelerator",
        "states_on_host",
    ),
    "planner.attention_cost": ("Workload",),
    "sequence.documents": ("Documents",),
    "sequence.masks": ("Mask",),
    "trainer": (
        "LongContextTrainer",
        "LongContextTrainerMixin",
        "TrainerParallelism",
        "trainer_parallelism",
    ),
    "trainer.context_scores": ("ContextEvaluationCallback",),
    "transport": ("run_virtual_ranks",),
    "transport.meeting": ("SequenceParallelismError",),
    "verification": ("all_configs", "run_processes", "verify", "verify_on_virtual_ranks"),
}
_HOME = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = [
    "BadStepError",
    "ContextEvaluation",
    "ContextEvaluationCallback",
    "ContextScores",
    "Documents",
    "DriftError",
    "FiniteSteps",
    "LongContextConfig",
    "LongContextTrainer",
    "LongContextTrainerMixin",
    "Mask",
    "PaceCheck",
    "PatchHandle",
    "Sentinel",
    "SequenceGroup",
    "SequenceParallelismConfig",
    "SequenceParallelismError",
    "SequenceShardCollator",
    "StepHistory",
    "StepNumbers",
    "TimeLimits",
    "TrainerParallelism",
    "UnsupportedModelError",
    "Watchdog",
    "WillNotFit",
    "Workload",
    "__version__",
    "accelerate_yaml",
    "all_configs",
    "attention",
    "check_weights",
    "choose_fused_layers",
    "close_accelerator",
    "compare",
    "compare_scores",
    "count_valid_tokens",
    "evaluate_context",
    "fuse_layers",
    "make_accelerator",
    "make_sequence_group",
    "masks",
    "model_facts",
    "pack_rows",
    "patch",
    "preflight",
    "require_agreement",
    "require_fused_layers",
    "run_processes",
    "run_virtual_ranks",
    "scale_rope",
    "states_on_host",
    "trainer_parallelism",
    "verify",
    "verify_on_virtual_ranks",
    "virtual_group",
    "world_place",
]


def __getattr__(name: str) -> Any:
    if name == "masks":
        return import_module(f"{__name__}.sequence.masks")
    if name not in _HOME:
        why = import_module(f"{__name__}.rules.gone").GONE_NAMES.get(name, "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {why}".rstrip(" ."))
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
