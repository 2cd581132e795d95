"""`LongContextTrainerMixin`: transformers' Trainer, or one of TRL's, over sharded sequences.

Trainers stay what they are: the patched model takes the whole rows that they batch and returns what
one process returns. The overrides here tell them of the ranks that share a sequence.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer, TrainingArguments

from longctx_patch.config import LongContextConfig, require_config
from longctx_patch.health.finite import check_guard_settings
from longctx_patch.health.watchdog import Watchdog
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.memory.allocator import let_segments_grow
from longctx_patch.plugin.accelerator import (
    launched_sizes,
    read_when_sharded,
    require_one_precision,
    shard_frozen,
)
from longctx_patch.plugin.gradients import (
    exact_mixed_precision,
    keep_gradients_sharded,
    settle_when_prepared,
)
from longctx_patch.plugin.parallelism import data_parallel_sizes
from longctx_patch.rules.gone import refuse_gone
from longctx_patch.rules.launched import flag
from longctx_patch.rules.number_rules import number_problems
from longctx_patch.rules.together import refuse_together
from longctx_patch.rules.versions import warn_untested
from longctx_patch.rules.world import require_whole_groups
from longctx_patch.trainer.axis import num_processes, trainer_parallelism
from longctx_patch.trainer.bad_steps import FiniteStepsMixin
from longctx_patch.trainer.binding import (
    keep_checkpointing,
    patch_for_trainer,
    patch_reference,
    settle_checkpointing,
    settle_reading,
)
from longctx_patch.trainer.each_forward import EachForwardMixin
from longctx_patch.trainer.evaluating import EvaluationMixin
from longctx_patch.trainer.evaluation import GroupGather
from longctx_patch.trainer.generation import (
    GenerationMixin,
    GroupsAsProcesses,
    generation_problems,
    settle_generation,
)
from longctx_patch.trainer.head_scores import scores_of
from longctx_patch.trainer.images import (
    image_problems,
    require_images_alike,
    settle_unused,
    unused_problems,
)
from longctx_patch.trainer.prompt_groups import PromptGroupsMixin, grouping_problems
from longctx_patch.trainer.record import (
    format_problems,
    log_changes,
    record_of,
    resume_problems,
    write_record,
)
from longctx_patch.trainer.refusals import (
    accelerator_problems,
    argument_problems,
    cut_by_default,
    explains_missing_logits,
    refuse_shards,
    require_mixin_first,
    trainer_problems,
)
from longctx_patch.trainer.router_loss import leave_out_missing_router_loss, router_problems
from longctx_patch.trainer.saved_states import has_states
from longctx_patch.trainer.sealing import SealedCheckpointsMixin, kept_problems
from longctx_patch.trainer.seeds import seeded_by_group
from longctx_patch.trainer.watching import HealthCallback, SentinelCallback, WatchedMixin

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class LongContextTrainerMixin(
    EvaluationMixin,
    WatchedMixin,  # before those below, which may wait for a rank that was told otherwise
    SealedCheckpointsMixin,
    EachForwardMixin,
    FiniteStepsMixin,
    GenerationMixin,
    PromptGroupsMixin,
    _Trainer,
):
    """Trains a patched model with the numbers of one process.

    Write it before the trainer that it is mixed into, and give `long_context` beside the trainer's
    own arguments. The model, also one that TRL loads by its name, that `model_init` makes or that
    has adapters, is patched before it is wrapped, and so is a reference model. Batches, losses,
    metrics and schedules are those of the same trainer on as many processes as there are sequence
    groups. A checkpoint has a manifest with a checksum of each file, and is checked by it.

    Args:
        long_context: degrees and more; or the handle of the model, if it is patched already.
        keep_every: with `save_total_limit`, checkpoints of every so many steps are kept for ever;
            0 for none.
        save_in_background: train on while a checkpoint's weights and optimizer states are written,
            from copies on the host. Training waits, which is said, where the host has no room for
            them, and where somebody may look into a checkpoint that was just saved: a callback's
            own `on_save`, an upload, or a subclass's own `save_model`. It waits for the last one.
        watchdog: a `Watchdog` in whose context the trainer trains; its steps, evaluations and
            checkpoints are marked.
        skip_bad_steps: how many steps may be left out of training because their loss or gradient is
            not finite, in all. One more ends it, and nothing of such a step is saved.
        group_by_prompt: bring rows of one prompt together in the micro-batches of a step, so that
            they share it; GRPOTrainer and RLOOTrainer shuffle them apart. Each step keeps its rows
            and its loss. Logged means over micro-batches (`entropy`, `kl`) weigh them as they are.
        sentinel_every: steps between comparisons of the sharded model with one rank alone, on the
            beginning of the first row of `train_dataset`; 0 for never.
        args, kwargs: passed on to the trainer.

    Attributes:
        long_context_handle: the model's `PatchHandle`.

    Raises:
        TypeError: a class has the trainer before the mixin.
        ValueError: on all ranks, if the trainer's arguments ask for what can't be exact.
        BadStepError, DriftError: on all ranks, in `train`.
        OSError: in `train`, after the step in which a checkpoint could not be written.
        UnsupportedModelError: the model has something that would silently go wrong.

    Example:
        >>> class MyTrainer(LongContextTrainerMixin, SFTTrainer):
        ...     pass
        >>> config = LongContextConfig(ring_degree=2)
        >>> trainer = MyTrainer(model=model, args=args, train_dataset=rows, long_context=config)
        >>> trainer.train()
    """

    long_context_handle: PatchHandle
    _signature_columns: list[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        require_mixin_first(cls, LongContextTrainerMixin)

    def __init__(
        self,
        *args: Any,
        long_context: LongContextConfig | PatchHandle,
        skip_bad_steps: int = 0,
        sentinel_every: int = 0,
        group_by_prompt: bool = False,
        keep_every: int = 0,
        save_in_background: bool = False,
        watchdog: Watchdog | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_gone(kwargs)
        check_guard_settings(skip_bad_steps, sentinel_every)
        if any(kind.__module__.partition(".")[0] == "trl" for kind in type(self).__mro__):
            warn_untested(["trl"])
        let_segments_grow()
        self._skip_bad_steps, self._sentinel_every = skip_bad_steps, sentinel_every
        self._group_by_prompt = group_by_prompt
        self._keep_every, self._save_in_background = keep_every, save_in_background
        if not isinstance(long_context, PatchHandle):
            require_config(long_context, "long_context")
        self._long_context, self._watchdog = long_context, watchdog
        self._undo: list[Callable[[], None]] = []
        self._of_reference = ExitStack()
        self._reference: Any = None
        super().__init__(*args, **kwargs)
        try:
            refuse_together(trainer_problems(self, self._config))
            refuse_together(generation_problems(self, self._config.sequence_degree))
            refuse_together(router_problems(self))
            if group_by_prompt:
                refuse_together(grouping_problems(self, self._config))
            refuse_together(image_problems(self))
            if sentinel_every:
                self.add_callback(SentinelCallback(self, sentinel_every))
        except ValueError:
            self.unpatch()
            raise
        leave_out_missing_router_loss(self)
        self.seed_groups()
        self._health = HealthCallback(self, watchdog)
        self.add_callback(self._health)

    @property
    def _config(self) -> LongContextConfig:
        given = self._long_context
        return given.config if isinstance(given, PatchHandle) else given

    # ---- Axis and patch ----

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, set the axis, and patch the model before anything wraps it."""
        config, degree = self._config, self._config.sequence_degree
        _ = self.args.device  # sets up torch.distributed
        require_whole_groups(config.degrees_in_words, degree, num_processes())
        refuse_together(number_problems(self.args, TrainingArguments))
        refuse_together(kept_problems(self.args, self._keep_every))
        refuse_together(argument_problems(self.args, config, num_processes() // degree))
        if said := cut_by_default(self.args):
            warnings.warn(said, stacklevel=2)
        settle_checkpointing(self.args, config)
        settle_reading(self.args, config)
        settle_generation(self.args, num_processes() // degree)
        if num_processes() // degree == 1 and degree > 1:
            self.args.average_tokens_across_devices = True  # one group: the same mean
        if self.args.parallelism_config is None and num_processes() > 1:
            self.args.parallelism_config = self._axis()
        refuse_together(unused_problems(self.args, self.model))
        settle_unused(self.args, self.model)
        super().create_accelerator_and_postprocess()
        require_one_precision(self.accelerator)
        refuse_together(accelerator_problems(self.accelerator, degree))
        read_when_sharded(self.accelerator)
        settle_when_prepared(self.accelerator)
        self._settle_reductions()
        self._gather = GroupGather(self.accelerator, degree)
        self._groups = GroupsAsProcesses(self.accelerator, degree)
        self.accelerator.gather_for_metrics = self._gather.repeated
        if self.model is not None:
            self._patch(self.model)

    def _axis(self) -> Any:
        config = self._config
        fsdp2 = bool(self.args.fsdp) or flag("ACCELERATE_USE_FSDP")
        groups = num_processes() // config.sequence_degree
        replicate, shard = data_parallel_sizes(
            groups, *launched_sizes(config, None, None), fsdp2=fsdp2
        )
        return trainer_parallelism(config, dp_replicate_size=replicate, dp_shard_size=shard)

    def _settle_reductions(self) -> None:
        """Under FSDP2, reduce in float32, hand losses on as they are, and keep gradients sharded
        between the forwards of a step unless the arguments decide that."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = exact_mixed_precision(str(self.accelerator.mixed_precision))
        if plugin is not None and policy is not None:
            plugin.mixed_precision_policy = policy
        asked = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        if self.accelerator.is_fsdp2 and "sync_each_batch" not in asked:
            keep_gradients_sharded(self.accelerator)

    def _patch(self, model: Any) -> None:
        self.unpatch()
        self.long_context_handle = handle = patch_for_trainer(model, self._long_context)
        handle._rows.head_scores = scores_of(self)
        if handle is not self._long_context:
            self._undo.append(handle.unpatch)
        self._undo.append(keep_checkpointing(handle))

    def unpatch(self) -> None:
        """Give back the models as they were, with the weights that they have. Every process calls
        it. A model whose handle was given stays patched."""
        self._of_reference.close()
        while self._undo:
            self._undo.pop()()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model that `model_init` makes, patched."""
        model: nn.Module = super().call_model_init(trial)
        self._patch(model)
        return model

    @property
    def ref_model(self) -> Any:
        """The model whose outputs TRL's preference losses compare with, patched too."""
        return self._reference

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        is_new = isinstance(base, PreTrainedModel) and model is not self._reference
        if model is None:
            self._of_reference.close()  # TRL lets go of it once its numbers are computed ahead
        if is_new and not isinstance(base, FSDPModule):  # then it was patched before
            handle = patch_reference(model, self._config)
            # By the same head, so that rounding cancels out of the policy's ratio to it.
            handle._rows.head_scores = scores_of(self)
            self._of_reference.callback(handle.unpatch)
            self._of_reference.enter_context(handle.sharing_evaluation())
            # TRL hashes whole weights before it computes all of a reference's numbers ahead, and
            # would else shard it as one unit, which each GPU gathers whole.
            ahead = getattr(self.args, "precompute_ref_log_probs", False)
            if self.accelerator.is_fsdp2 and not ahead:
                shard_frozen(self.accelerator, model)
        self._reference = model

    # ---- What is counted once per group ----

    def get_train_dataloader(self) -> Any:
        """The trainer's, whose workers draw alike on the ranks of a group."""
        return seeded_by_group(super().get_train_dataloader(), self._config.sequence_degree)

    def get_tp_size(self) -> int:
        """The number of ranks with the same batch."""
        return self._config.sequence_degree

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        refuse_shards(batch_samples)
        count = super()._get_num_items_in_batch(batch_samples, device)
        # FSDP2's mixed precision would round a tensor of floats before the model sees it.
        if not isinstance(count, Tensor) or not (number := float(count)).is_integer():
            return count
        return int(number)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self._config.sequence_degree

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "seq_lengths" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, "seq_lengths"]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """transformers' step; an error for want of logits says how to have them."""
        require_images_alike(self, inputs)
        with explains_missing_logits(self._config):
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    # ---- Saving and resuming ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers' files, and `longctx.json` beside them."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            record = self._record() | {"gets_manifest": self._saving is not None}
            write_record(output_dir or self.args.output_dir, record)

    def _record(self) -> dict[str, Any]:
        return record_of(self.long_context_handle, num_processes())

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not has_states(resume_from_checkpoint):
            is_fsdp = self.is_fsdp_enabled
            refuse_together(format_problems(resume_from_checkpoint, is_fsdp=is_fsdp))
        refuse_together(resume_problems(resume_from_checkpoint, self._record()))
        if self.is_world_process_zero():
            log_changes(resume_from_checkpoint, self._record())
        super()._load_from_checkpoint(resume_from_checkpoint, model)


class LongContextTrainer(LongContextTrainerMixin, Trainer):
    """transformers' Trainer over sharded sequences: see `LongContextTrainerMixin`.

    Example:
        >>> config = LongContextConfig(ulysses_degree=2, ring_degree=2)
        >>> trainer = LongContextTrainer(model=model, args=args, long_context=config, ...)
        >>> trainer.train()
    """
