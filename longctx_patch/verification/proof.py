"""Compare processes with a patched model to one process with the stock model.

The calling process runs the small model with stock attention once; then one set of processes runs
every case from the same weights and rows, through the public patch, collator and loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longctx_patch.config import LongContextConfig
from longctx_patch.data import SHARD_KEY, SequenceShardCollator
from longctx_patch.data.descriptor import Descriptor
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.family import ROUTER
from longctx_patch.families.supported import FAMILIES
from longctx_patch.families.text_part import text_part
from longctx_patch.hf.patching import patch
from longctx_patch.plans.traffic import Traffic
from longctx_patch.rules.names import require_choice
from longctx_patch.transport.processes import run_processes
from longctx_patch.verification.cases import TOLERANCES, CaseResult, Errors, Report, plan_name
from longctx_patch.verification.reference import (
    Rows,
    Step,
    compute_reference,
    gradient_errors,
    make_rows,
    mean_gradients,
    relative_error,
    train,
    worst_of,
)
from longctx_patch.verification.shrink import build_small_model, shrink_config

SEQ_LEN = 127
"""A prime, so that no degree divides it."""


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
    reference = compute_reference(small, rows, dtype)
    by_rank = run_processes(
        run_rank, num_ranks, small, list(configs), rows, dtype, timeout_s=timeout_s
    )
    cases = [
        _case_result(family.name, config, rows, steps, reference, TOLERANCES[dtype])
        for config, steps in zip(configs, zip(*by_rank, strict=True), strict=True)
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
    rank: int, small: Any, configs: Sequence[LongContextConfig], rows: Rows, dtype: str
) -> list[Step]:
    """Run all cases, in one process of the group."""
    del rank  # torch.distributed knows it
    return [_run_case(small, config, rows, dtype) for config in configs]


def _run_case(small: Any, config: LongContextConfig, rows: Rows, dtype: str) -> Step:
    model = build_small_model(small, getattr(torch, dtype))
    handle = patch(model, on_cpu(config))
    batch = _shard(handle.config, handle.group_rank, rows)
    with torch.no_grad():  # a pass with labels may return no logits
        unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
        logits = model(**unlabelled).logits
    handle.counters.reset()  # only the training step is compared with the plans
    return train(model, batch, handle)._replace(logits=logits)


def _shard(config: LongContextConfig, rank: int, rows: Rows) -> dict[str, Tensor]:
    return SequenceShardCollator(config, group_rank=rank, pad_token_id=0)(rows)


def on_cpu(config: LongContextConfig) -> LongContextConfig:
    """The config, without a kernel that only a GPU has, for rows of any length, and with the full
    attention of the stock model: both sides of a comparison run the same ones."""
    kernel = "reference" if config.kernel == "reference" else "auto"
    return replace(config, kernel=kernel, allow_beyond_reach=True, shifted_group=0)


def _logits_error(
    config: LongContextConfig, rows: Rows, ranks: Sequence[Step], expected: Tensor | None
) -> float:
    """Error of the logits of the whole sequence, put together from all ranks without padding."""
    assert expected is not None
    parts = [step.logits for step in ranks if step.logits is not None]
    documents = Descriptor.read(_shard(config, 0, rows)[SHARD_KEY]).documents
    whole = config.layout_of(documents).unshard(parts, 1)
    lengths = [len(row["input_ids"]) for row in rows]
    if len(whole) == 1:
        lengths = [sum(lengths)]
    actual = torch.cat([row[:length] for row, length in zip(whole, lengths, strict=True)])
    return relative_error(actual, expected)


def _norm(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def _case_result(
    family: str,
    config: LongContextConfig,
    rows: Rows,
    ranks: Sequence[Step],
    reference: Step,
    tolerance: float,
) -> CaseResult:
    packed = "seq_lengths" in rows[0]
    sent = sum((step.sent for step in ranks), Traffic())
    planned = sum((step.planned for step in ranks), Traffic())
    as_predicted = all(step.sent == step.planned for step in ranks)
    grads = mean_gradients(ranks)
    by_name = gradient_errors(grads, reference)
    worst = worst_of(by_name)
    errors = Errors(
        loss_rel_err=abs(sum(step.loss for step in ranks) / len(ranks) / reference.loss - 1),
        logits_rel_err=_logits_error(config, rows, ranks, reference.logits),
        grad_rel_err=by_name[worst],
        worst_parameter=worst,
        grad_norm_rel_err=abs(_norm(grads) / _norm(reference.grads) - 1),
    )
    return CaseResult(
        **vars(errors),
        family=family,
        mask=ranks[0].mask,
        plan=plan_name(config, packed=packed),
        ulysses=config.ulysses_degree,
        ring=config.ring_degree,
        layout=config.packed_placement if packed else config.placement,
        checkpoint=config.checkpoint,
        messages=sent.messages,
        bytes=sent.bytes,
        predicted_messages=planned.messages,
        predicted_bytes=planned.bytes,
        traffic_as_predicted=as_predicted,
        ok=as_predicted and errors.within(tolerance),
    )
