"""Compare processes with a patched model to one process with the stock model.

The calling process runs the small model with stock attention once; then one set of processes runs
every case from the same weights and rows, through the public patch, collator and loss.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx_patch.config import LongContextConfig
from longctx_patch.data import SHARD_KEY, SequenceShardCollator
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.family import ROUTER
from longctx_patch.families.supported import FAMILIES
from longctx_patch.families.text_part import text_part
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.hf.patching import patch
from longctx_patch.plans.traffic import Traffic
from longctx_patch.rules.names import require_choice
from longctx_patch.sequence.documents import Documents
from longctx_patch.transport.processes import run_processes
from longctx_patch.verification.cases import TOLERANCES, CaseResult, Errors, Report, plan_name
from longctx_patch.verification.reference import (
    Reference,
    Rows,
    compute_reference,
    make_rows,
    relative_error,
)
from longctx_patch.verification.shrink import VOCAB_SIZE, build_small_model, shrink_config

SEQ_LEN = 127
"""A prime, so that no degree divides it."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """A rank's report about a case."""

    errors: Errors
    mask: str
    sent: Traffic
    predicted: Traffic


def verify(
    model_config: Any,
    configs: Sequence[LongContextConfig],
    *,
    dtype: str = "float32",
    seq_len: int = SEQ_LEN,
    packed: bool = False,
    timeout_s: float = 300.0,
) -> Report:
    """Train one step of a shrunken model under each config and compare it with one process.

    Args:
        model_config: transformers config of the model; weights are not needed.
        configs: what to verify, all with the same `sequence_degree`, which is the number of
            processes. GPU kernels are replaced by the CPU's.
        dtype: float32 or float64; it decides the tolerance.
        seq_len: tokens of the longer of the two rows.
        packed: cut the rows into documents, each of which the reference process runs by itself.
        timeout_s: hard limit, after which all processes are killed.

    Raises:
        UnsupportedModelError, ValueError: the model, a config or an argument is refused, before
            anything is started.
        ProcessesFailedError: a rank failed or time ran out; the text holds each rank's trace.

    Example:
        >>> report = verify(LlamaConfig(), all_configs(2))  # doctest: +SKIP
        >>> report.ok
        True
    """
    num_ranks = _checked_ranks(model_config, configs, dtype, seq_len)
    family = FAMILIES[model_config.model_type]
    small = shrink_config(model_config)
    if ROUTER in family.features:
        small.output_router_logits = True
    rows = make_rows(small.vocab_size, seq_len, packed=packed)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "reference.pt"
        torch.save(vars(compute_reference(small, rows, dtype)), file)
        by_rank = run_processes(
            run_rank, num_ranks, small, list(configs), rows, dtype, file, timeout_s=timeout_s
        )
    cases = [
        _case_result(
            config, [results[i] for results in by_rank], TOLERANCES[dtype], family.name, packed
        )
        for i, config in enumerate(configs)
    ]
    return Report(
        model_type=model_config.model_type,
        num_ranks=num_ranks,
        dtype=dtype,
        seq_len=seq_len,
        tolerance=TOLERANCES[dtype],
        cases=tuple(cases),
    )


def _checked_ranks(
    model_config: Any, configs: Sequence[LongContextConfig], dtype: str, seq_len: int
) -> int:
    """Refuse what can't be verified; return the number of processes."""
    require_choice("dtype", dtype, TOLERANCES)
    if text_part(model_config) is not model_config:
        raise ValueError(
            f"a config of {model_config.model_type}, which reads images too: its text model is "
            "verified. Give load_model_config(NAME) of longctx_patch.families.load_config."
        )
    if seq_len < 3:
        raise ValueError(f"seq_len={seq_len}: it must be 3 or more, so that a label can be cut.")
    degrees = {config.sequence_degree for config in configs}
    if len(degrees) != 1:
        raise ValueError(
            f"configs over {sorted(degrees)} ranks: one set of processes runs them all, so there "
            "must be one or more, of one sequence_degree. Verify each degree by itself."
        )
    for config in configs:
        check_model_config(model_config, config)
    return degrees.pop()


def run_rank(
    rank: int,
    small_config: Any,
    configs: Sequence[LongContextConfig],
    rows: Rows,
    dtype: str,
    reference_file: Path,
) -> list[RankResult]:
    """Run all cases, in one process of the group."""
    del rank  # torch.distributed knows it
    reference = Reference(**torch.load(reference_file))
    return [_run_case(small_config, config, rows, dtype, reference) for config in configs]


def _run_case(
    small_config: Any, config: LongContextConfig, rows: Rows, dtype: str, reference: Reference
) -> RankResult:
    model = build_small_model(small_config, getattr(torch, dtype))
    handle = patch(model, on_cpu(config))
    collate = SequenceShardCollator(handle.config, group_rank=handle.group_rank, pad_token_id=0)
    batch = collate(rows)
    documents = Descriptor.read(batch[SHARD_KEY]).documents
    with torch.no_grad():  # a pass with labels may return no logits
        unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
        logits_error = _logits_error(handle, documents, model(**unlabelled).logits, rows, reference)
    handle.counters.reset()  # only the training step is compared with the plans
    loss = model(**batch).loss
    loss.backward()
    step = handle.first_step
    sent = Traffic(handle.counters.messages, handle.counters.bytes)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    grads = {name: _mean_over_ranks(p.grad) for name, p in trained}
    worst, grad_error = _worst_gradient(grads, reference.grads)
    errors = Errors(
        loss_rel_err=abs(_mean_over_ranks(loss).item() / reference.loss - 1),
        logits_rel_err=logits_error,
        grad_rel_err=grad_error,
        worst_parameter=worst,
        grad_norm_rel_err=abs(_norm(grads) / _norm(reference.grads) - 1),
    )
    return RankResult(
        errors=errors,
        mask="stock attention" if step is None else step.masks,
        sent=sent,
        predicted=Traffic() if step is None else step.planned_forward() + step.planned_backward(),
    )


def on_cpu(config: LongContextConfig) -> LongContextConfig:
    """The config, without a kernel that only a GPU has, for rows of any length, and with the full
    attention of the stock model: both sides of a comparison run the same ones."""
    kernel = "reference" if config.kernel == "reference" else "auto"
    return replace(config, kernel=kernel, allow_beyond_reach=True, shifted_group=0)


def _mean_over_ranks(value: Tensor | None) -> Tensor:
    """The mean over ranks, as DDP takes it of a gradient."""
    assert value is not None
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _logits_error(
    handle: PatchHandle, documents: Documents, logits_BLV: Tensor, rows: Rows, reference: Reference
) -> float:
    """Error of the logits of the whole sequence, put together from all ranks without padding."""
    layout = handle.group.layout(documents)
    shards = [logits_BLV.new_empty((len(logits_BLV), n, VOCAB_SIZE)) for n in layout.sizes]
    dist.all_gather(shards, logits_BLV.contiguous())
    whole = layout.unshard(shards, 1)
    lengths = [sum(len(row["input_ids"]) for row in rows)]
    if len(whole) > 1:
        lengths = [len(row["input_ids"]) for row in rows]
    actual = torch.cat([row[:length] for row, length in zip(whole, lengths, strict=True)])
    return relative_error(actual, reference.logits_NV)


def _worst_gradient(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """(parameter, relative error) with the largest error; NaN counts as the largest."""
    errors = {name: relative_error(grads[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return worst, errors[worst]


def _norm(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def _case_result(
    config: LongContextConfig,
    ranks: Sequence[RankResult],
    tolerance: float,
    family: str,
    packed: bool,
) -> CaseResult:
    sent = sum((rank.sent for rank in ranks), Traffic())
    predicted = sum((rank.predicted for rank in ranks), Traffic())
    as_predicted = all(rank.sent == rank.predicted for rank in ranks)
    return CaseResult(
        **vars(ranks[0].errors),
        family=family,
        mask=ranks[0].mask,
        plan=plan_name(config, packed=packed),
        ulysses=config.ulysses_degree,
        ring=config.ring_degree,
        layout=config.packed_placement if packed else config.placement,
        checkpoint=config.checkpoint,
        messages=sent.messages,
        bytes=sent.bytes,
        predicted_messages=predicted.messages,
        predicted_bytes=predicted.bytes,
        traffic_as_predicted=as_predicted,
        ok=as_predicted and ranks[0].errors.within(tolerance),
    )
