"""Holds a patched model, and answers what can be asked of it: `patch` returns this."""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from longctx_patch.config import LongContextConfig
from longctx_patch.data import SHARD_KEY
from longctx_patch.data.whole_rows import WANTED_KEY
from longctx_patch.engine.groups import SequenceGroup
from longctx_patch.hf.call.decoder_call import DecoderCalls
from longctx_patch.hf.call.fire_check import FireCheck
from longctx_patch.hf.call.row import MaskFactory
from longctx_patch.hf.layers.checkpointing import Checkpointing, LayerCheckpoints
from longctx_patch.hf.layers.mlp_tiles import tiles_of_layers
from longctx_patch.hf.loss.token_head import TokenFields
from longctx_patch.hf.row_passes import RowPasses
from longctx_patch.transport import Counters

Item = TypeVar("Item")
Batch = TypeVar("Batch", bound=Mapping[str, Any])


def ahead(
    batches: Iterable[Item], prepare: Callable[[Item], None], *, depth: int = 1
) -> Iterator[Item]:
    """The batches in order; `prepare` runs for each in a thread, `depth` batches ahead.

    Packed rows have other documents in every batch and so need new plans, which take milliseconds
    of the CPU while the device would wait. An error in `prepare` is raised in place of its batch.
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: plans are made 1 batch ahead or more.")
    waiting: deque[tuple[Item, Future[None]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="longctx-plans") as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(prepare, batch)))
            if len(waiting) > depth:
                yield _ready(*waiting.popleft())
        while waiting:
            yield _ready(*waiting.popleft())


def _ready(batch: Item, prepared: Future[None]) -> Item:
    prepared.result()
    return batch


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the context the model is in evaluation mode and makes no gradients.

    Afterwards each module has the mode that it had, and FSDP2 holds shards alone.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        hold_shards_alone(model)


def hold_shards_alone(model: nn.Module) -> None:
    """Let FSDP2 free weights that a forward without backward left whole, such as the head. The
    optimizer's states can't be named while they are."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(repr=False)
class PatchHandle:
    """A patched model; `unpatch` restores it."""

    model: PreTrainedModel
    _calls: DecoderCalls
    _rows: RowPasses
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _knows_ddp: bool = False

    def __repr__(self) -> str:
        """Returns what is patched and how, in a line; the model itself would fill a page."""
        return (
            f"<patched {type(self.model).__name__}: rank {self.group_rank} of "
            f"{self.config.degrees_in_words}, loss={self.config.loss!r}, {self.checkpointing}>"
        )

    @property
    def group(self) -> SequenceGroup:
        """The ranks that share a sequence, as this one sees them."""
        return self._calls.group

    @property
    def mask(self) -> MaskFactory | None:
        """The function that was given to `patch`, with its results cached by length."""
        return self._calls.mask

    @property
    def config(self) -> LongContextConfig:
        return self.group.config

    @property
    def group_rank(self) -> int:
        """This process's rank among those that share its sequence."""
        return self.group.group_rank

    @property
    def is_patched(self) -> bool:
        """Says whether the model is patched still: `unpatch` was not called."""
        return bool(self._undo)

    @property
    def first_step(self) -> FireCheck | None:
        """Returns what the first sharded training step has run and sent; print it."""
        return self._calls.first_step.check

    @property
    def _checkpoints(self) -> LayerCheckpoints:
        return self._calls.checkpoints

    @property
    def checkpointing(self) -> Checkpointing:
        """Says which layers are recomputed, and by which memory `checkpoint="auto"` decided."""
        return self._checkpoints.report()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the attention kernels that were chosen on GPUs so far (with `kernel="auto"` by
        measurement, unless `deterministic`); none on the CPU."""
        return self.group.kernels.names

    @property
    def mlp_tiles(self) -> tuple[int, ...]:
        """Number of tiles in which the MLP of each layer, in order, last ran; 1 for experts."""
        return tiles_of_layers(self.model)

    def reserve_host(self, num_bytes: int) -> None:
        """Keep `num_bytes` of host memory free of offloaded tensors, for what this process
        allocates later, such as optimizer states under FSDP2's CPU offload. Pass 0 once it has done
        so."""
        self._checkpoints.reserve_host(num_bytes)

    @property
    def counters(self) -> Counters:
        """Messages, bytes and kernel calls of this process since the patch or `reset()`."""
        return self.group.counters

    def plan_ahead(self, batches: Iterable[Batch], *, depth: int = 1) -> Iterator[Batch]:
        """Yield the same batches, shards or whole rows, and make the plans of each during the step
        before it.

        Packed rows need new plans with every batch. Iterate over `handle.plan_ahead(loader)`, and
        the plans are ready with the batch, once a first step has shown which layers the model has.
        `depth`: how many batches to be ahead; where gradients accumulate, the batches of a step.

        Raises:
            ValueError: Accelerate accumulates over a prepared loader, which says that it has ended
                once it has been read to its end.

        Example:
            >>> for batch in handle.plan_ahead(loader):  # doctest: +SKIP
            ...     model(**batch).loss.backward()
        """
        state = getattr(batches, "gradient_state", None)
        if state is not None and state.num_steps > 1:
            raise ValueError(
                f"plan_ahead over a prepared loader with gradient_accumulation_steps="
                f"{state.num_steps}: it reads batches ahead, so accumulate() would see the end of "
                "the loader too early and make an optimizer step. Iterate over the loader itself."
            )
        try:
            yield from ahead(batches, self._make_plans, depth=depth)
        finally:
            self._calls.prepared.clear()

    @contextmanager
    def sharing_evaluation(self) -> Iterator[None]:
        """Within the context the ranks of a group share whole rows in evaluation mode as well.

        Collective: all of them evaluate the same batches, with labels and under
        `torch.no_grad()`, and each gets the loss of the whole rows. A batch without
        labels takes the stock path, as `generate` does and as every batch does outside of the
        context: each rank runs its whole rows by itself.

        Example:
            >>> with torch.no_grad(), handle.sharing_evaluation():  # doctest: +SKIP
            ...     losses = [model(**batch).loss for batch in held_out]
        """
        before, self._rows.shares_evaluation = self._rows.shares_evaluation, True
        try:
            yield
        finally:
            self._rows.shares_evaluation = before

    def _make_plans(self, batch: Mapping[str, Any]) -> None:
        shard = batch.get(SHARD_KEY)
        if shard is None:
            shard = self._rows.described(batch)
        if shard is not None:
            self._calls.make_plans(shard)

    def token_log_probs(
        self, batch: Mapping[str, Any], *, model: nn.Module | None = None
    ) -> Tensor:
        """Log-probability of each label of whole rows, for losses of one's own (DPO, GRPO, KL).

        Collective over the ranks that share a sequence, in training and in evaluation: all of them
        give the same rows, and each gets all values. Compute the same loss of them on every rank.
        Its gradients are averaged over all ranks, as DDP and FSDP do, and are then those of one
        process. Logits exist for a tile of tokens at a time, in forward and backward
        (`longctx_patch.loss.token_log_probs`), unless a forward hook on the head asks for them.

        Args:
            batch: `input_ids` and `labels` `[B, L]`, labels unshifted and -100 where no value is
                wanted, and, as for a pass with a loss, `attention_mask` or `position_ids` and what
                else says padding and documents.
            model: the module that the loop trains, where it wraps the patched model: that of DDP
                or PEFT, or a compiled one. None: the patched model itself.

        Returns:
            `[B, L - 1]`, float32 (float64 for a model in float64), the same on every rank of the
            group: in column t that of the label in column t + 1, given all tokens before it in its
            document; 0 where this label is -100. A router's loss is not part of it.

        Raises:
            ValueError: on all ranks, rows that can't be read, or gradients in evaluation mode; on
                this one, DDP around the model that `model` doesn't name, since the gradients would
                never be averaged.

        Example:
            >>> chosen, rejected = handle.token_log_probs(batch).sum(1).chunk(2)  # doctest: +SKIP
            >>> loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()  # doctest: +SKIP
        """
        if model is None and self.model.training and torch.is_grad_enabled():
            self._refuse_hidden_ddp()
        outputs = (model or self.model)(**batch, **{WANTED_KEY: "log_probs"})
        found: Tensor = outputs.log_probs
        return found

    def label_scores(
        self, batch: Mapping[str, Any], *, model: nn.Module | None = None
    ) -> TokenFields:
        """`token_log_probs`, and whether each label is what greedy decoding would emit there.

        For evaluation: collective over the ranks that share a sequence, which give the same rows,
        in evaluation mode and without gradients (`evaluation_mode`). Logits exist for a tile of
        labelled tokens at a time.

        Args: as those of `token_log_probs`.

        Returns:
            `log_probs`, and `is_top1`, `[B, L - 1]` bool: whether no word has a larger logit than
            the label, nor as large a one with a lower number. 0 and False where there is no label.

        Raises:
            ValueError: on all ranks, rows that can't be read, or gradients in evaluation mode.
        """
        options: dict[str, Any] = {WANTED_KEY: "top1"}
        if getattr(self.model.config, "output_router_logits", False):
            options["output_router_logits"] = False  # those of all tokens and layers
        outputs: TokenFields = (model or self.model)(**batch, **options)
        return outputs

    def _refuse_hidden_ddp(self) -> None:
        """Refuse a call past DDP. It is looked for once, when loops have wrapped their model."""
        # Without processes there is no DDP; and a thread of a virtual rank may be making a tuple,
        # which fails where anything refers to it before it is made.
        if self._knows_ddp or not torch.distributed.is_initialized():
            return
        self._knows_ddp = True
        wrappers = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
        if any(module is self.model for ddp in wrappers for module in ddp.modules()):
            raise ValueError(
                "token_log_probs of a model that DistributedDataParallel wraps: DDP would not "
                "average the gradients. Pass it: token_log_probs(batch, model=ddp_model)."
            )

    def unpatch(self) -> None:
        """Restore attention implementation, loss, hooks, MLPs and checkpointing. Call it once.

        Every process calls it, since it closes the process groups of the patch.
        """
        if not self._undo:
            raise ValueError("this model is unpatched already; patch(model, config) gives a handle")
        while self._undo:
            self._undo.pop()()
