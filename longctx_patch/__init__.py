"""Train Hugging Face models on very long sequences, with the numbers one GPU would give.

Names load at first use, so importing the package costs nothing. `attention` and its dependencies
need torch alone; `patch` and all that belongs to it also need transformers. `longctx_patch.masks`
is a module: its functions make a `Mask`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "longctx-patch runs on Linux (on macOS to try it out), not on Windows. Install it in WSL 2 "
        "(`wsl --install`), which has NVIDIA GPUs too."
    )

if TYPE_CHECKING:
    from longctx_patch.config import LongContextConfig as LongContextConfig
    from longctx_patch.data import SequenceShardCollator as SequenceShardCollator
    from longctx_patch.data import pack_rows as pack_rows
    from longctx_patch.engine.attention import attention as attention
    from longctx_patch.engine.groups import SequenceGroup as SequenceGroup
    from longctx_patch.engine.groups import make_sequence_group as make_sequence_group
    from longctx_patch.engine.groups import virtual_group as virtual_group
    from longctx_patch.engine.groups import world_place as world_place
    from longctx_patch.evaluation.context_evaluation import ContextEvaluation as ContextEvaluation
    from longctx_patch.evaluation.context_evaluation import evaluate_context as evaluate_context
    from longctx_patch.evaluation.scores import ContextScores as ContextScores
    from longctx_patch.evaluation.scores import compare_scores as compare_scores
    from longctx_patch.families.checks import UnsupportedModelError as UnsupportedModelError
    from longctx_patch.families.rope import scale_rope as scale_rope
    from longctx_patch.health.agreement import model_facts as model_facts
    from longctx_patch.health.agreement import require_agreement as require_agreement
    from longctx_patch.health.finite import BadStepError as BadStepError
    from longctx_patch.health.finite import FiniteSteps as FiniteSteps
    from longctx_patch.health.finite import StepHistory as StepHistory
    from longctx_patch.health.finite import StepNumbers as StepNumbers
    from longctx_patch.health.pace import PaceCheck as PaceCheck
    from longctx_patch.health.progress import TimeLimits as TimeLimits
    from longctx_patch.health.watchdog import Watchdog as Watchdog
    from longctx_patch.health.weights import check_weights as check_weights
    from longctx_patch.hf.handle import PatchHandle as PatchHandle
    from longctx_patch.hf.layers.fused_layers import choose_fused_layers as choose_fused_layers
    from longctx_patch.hf.layers.fused_layers import fuse_layers as fuse_layers
    from longctx_patch.hf.layers.fused_layers import require_fused_layers as require_fused_layers
    from longctx_patch.hf.patching import patch as patch
    from longctx_patch.hf.preflight import WillNotFit as WillNotFit
    from longctx_patch.hf.preflight import preflight as preflight
    from longctx_patch.hf.sentinel import DriftError as DriftError
    from longctx_patch.hf.sentinel import Sentinel as Sentinel
    from longctx_patch.loss.law import count_valid_tokens as count_valid_tokens
    from longctx_patch.planner.attention_cost import Workload as Workload
    from longctx_patch.planner.compare import compare as compare
    from longctx_patch.plugin import SequenceParallelismConfig as SequenceParallelismConfig
    from longctx_patch.plugin import accelerate_yaml as accelerate_yaml
    from longctx_patch.plugin import close_accelerator as close_accelerator
    from longctx_patch.plugin import make_accelerator as make_accelerator
    from longctx_patch.plugin import states_on_host as states_on_host
    from longctx_patch.sequence import masks as masks
    from longctx_patch.sequence.documents import Documents as Documents
    from longctx_patch.sequence.masks import Mask as Mask
    from longctx_patch.trainer import LongContextTrainer as LongContextTrainer
    from longctx_patch.trainer import LongContextTrainerMixin as LongContextTrainerMixin
    from longctx_patch.trainer import TrainerParallelism as TrainerParallelism
    from longctx_patch.trainer import trainer_parallelism as trainer_parallelism
    from longctx_patch.trainer.context_scores import (
        ContextEvaluationCallback as ContextEvaluationCallback,
    )
    from longctx_patch.transport import run_virtual_ranks as run_virtual_ranks
    from longctx_patch.transport.meeting import SequenceParallelismError as SequenceParallelismError
    from longctx_patch.verification import all_configs as all_configs
    from longctx_patch.verification import run_processes as run_processes
    from longctx_patch.verification import verify as verify
    from longctx_patch.verification import verify_on_virtual_ranks as verify_on_virtual_ranks

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

_NAMES = sorted(["__version__", "masks", *_HOME])
if not TYPE_CHECKING:  # type checkers take the imports above for all names
    __all__ = _NAMES


def __getattr__(name: str) -> Any:
    if name == "masks":
        return import_module(f"{__name__}.sequence.masks")
    if name not in _HOME:
        why = import_module(f"{__name__}.rules.gone").GONE_NAMES.get(name, "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {why}".rstrip(" ."))
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
