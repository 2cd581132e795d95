"""What a trainer can't do exactly is refused on all ranks, with the value, the rule and the fix."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainingArguments
from trl import SFTConfig

from longctx_patch import (
    LongContextConfig,
    LongContextTrainer,
    LongContextTrainerMixin,
    SequenceParallelismConfig,
    SequenceShardCollator,
    TrainerParallelism,
    patch,
    trainer_parallelism,
)
from longctx_patch.trainer import evaluation, refusals
from longctx_patch.trainer.refusals import (
    accelerator_problems,
    argument_problems,
    cut_by_default,
    trainer_problems,
)
from tests.hf.tiny import featured_model
from tests.plugin.launched import run_launched
from tests.trainer.trained import Case, arguments, make_trainer, padded, rows

RING = LongContextConfig(ring_degree=2)
CASE = Case("refused", config={"ring_degree": 2})
GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0: each rank .* Leave it out"),
    ({"learning_rate": 1e30}, r"learning_rate=1e\+30: a number from 0 to 100"),
    ({"weight_decay": math.nan}, r"weight_decay=nan: it must be a finite number"),
    ({"torch_compile": True}, r"torch_compile=True: .* Leave it out"),
    ({"auto_find_batch_size": True}, r"auto_find_batch_size=True: .*checkpoint='auto'"),
    (
        {"accelerator_config": {"split_batches": True}},
        r"split_batches=True in accelerator_config: .* different rows",
    ),
    (
        {"dataloader_in_order": False, "dataloader_num_workers": 2},
        r"dataloader_in_order=False with dataloader_num_workers=2: .* another order. Leave it out",
    ),
    (
        {"accelerator_config": {"dispatch_batches": True}},
        r"dispatch_batches=True in accelerator_config: .* as replicas. Leave it out",
    ),
    ({"train_sampling_strategy": "batch_rebalance"}, r"'batch_rebalance': .* 'group_by_length'"),
    ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1 with loss='chunked': .*, or 0"),
    (
        {"parallelism_config": SequenceParallelismConfig(cp_size=2, dp_replicate_size=1)},
        r"cp_size=2.*for 2 ranks per sequence.*trainer_parallelism\(config\)",
    ),
]
"""Arguments, and what is said about them."""


def refused(text: str, case: Case = CASE, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"(?s){text}"):
        make_trainer(case, "unused", is_patched=True, **options)


def check_arguments() -> None:
    for given, text in GIVEN:
        model = featured_model("llama")
        refused(text, replace(CASE, arguments=given), model=model)
        assert model.config._attn_implementation == "eager"


def check_options() -> None:
    refused(r"compute_loss_func with loss='chunked': .*or override", compute_loss_func=len)
    collate = SequenceShardCollator(RING, group_rank=0, pad_token_id=0)
    refused(r"data_collator is a SequenceShardCollator: .* whole rows", data_collator=collate)
    refused(r"model='llama'.*from_pretrained\('llama'\)", model="llama")
    model = featured_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    prepared = (optimizer, AcceleratedScheduler(schedule, optimizer))
    refused(r"lr_scheduler in optimizers=.* Give the scheduler itself", optimizers=prepared)
    handle = patch(model, RING)
    refused(r"patched already: give its handle", model=model)
    with pytest.raises(ValueError, match="handle of another model"):
        LongContextTrainer(
            featured_model("llama"), arguments("unused"), long_context=handle, data_collator=padded
        )


def check_batches() -> None:
    """Shards that come from elsewhere, and logits that are too large or never made."""
    collate = SequenceShardCollator(RING, group_rank=0, pad_token_id=0)
    trainer = make_trainer(CASE, "unused", is_patched=True, data_collator=lambda b: collate(b))
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=r"a batch with longctx_shard: .* whole rows"):
            run()
    case = replace(CASE, predicts=True)
    refused(r"compute_metrics with loss='chunked': .* LongContextConfig\(loss=\"logits\"\)", case)
    trainer = make_trainer(CASE, "unused", is_patched=True)
    with pytest.raises(
        ValueError, match=r"loss='chunked': .* LongContextConfig\(loss=\"logits\"\)"
    ):
        trainer.predict(rows(3, seed=0))
    evaluation.MOST_BYTES = 4000  # of this process alone
    case = replace(case, config=CASE.config | {"loss": "logits"})
    trainer = make_trainer(case, "unused", is_patched=True)
    with pytest.raises(ValueError, match=r"logits of 2 rows of \d+ tokens are 0.0 GiB: at most"):
        trainer.evaluate()


def check_plain_trainer() -> None:
    """A patched model in a Trainer that knows nothing of the group, or too little."""

    def trainer(**given: Any) -> Trainer:
        model: PreTrainedModel = featured_model("llama")
        patch(model, RING)
        args = arguments("unused", **given)
        options = {"train_dataset": rows(8, seed=1), "eval_dataset": rows(4, seed=2)}
        return Trainer(model, args, data_collator=padded, **options)

    for unknown in ({}, {"parallelism_config": SequenceParallelismConfig(cp_size=2)}):
        with pytest.raises(
            ValueError, match=r"a patched model in a trainer without .* LongContextTrainer"
        ):
            trainer(**unknown).train()
    known = trainer(parallelism_config=trainer_parallelism(RING), max_steps=2)
    known.train()
    with pytest.raises(
        ValueError, match=r"an evaluation by a trainer without LongContextTrainerMixin"
    ):
        known.evaluate()


def check_ranks_that_differ() -> None:
    """One rank asks for what is refused: the other learns of it, and nobody waits."""
    mine = torch.distributed.get_rank()
    given = {"neftune_noise_alpha": 5.0} if mine else {}
    refused("neftune_noise_alpha=5.0", replace(CASE, arguments=given))


def check_all() -> None:
    arguments("unused").device  # noqa: B018 - sets up torch.distributed
    check_ranks_that_differ()
    check_arguments()
    check_options()
    check_batches()
    check_plain_trainer()


def test_what_is_not_exact_is_refused() -> None:
    run_launched(check_all, 2)


def check_four() -> None:
    """Four ranks, two per sequence: means are over all tokens, and FSDP2 shards over the axis."""
    given = {"average_tokens_across_devices": False}
    refused(r"average_tokens_across_devices=False with 2 sequence", replace(CASE, arguments=given))
    mesh = trainer_parallelism(RING, 4, dp_shard_size=2).build_device_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_shard", "tp")
    assert mesh["dp_shard_cp"].size() == 4


def test_two_groups_of_two() -> None:
    run_launched(check_four, 4)


def assert_said(text: str, problems: Iterable[str]) -> None:
    (problem,) = problems
    assert re.match(text, problem), problem


def test_other_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LongContextConfig()
    several = SimpleNamespace(n_gpu=4, deepspeed=None, output_dir="out")
    assert_said(r"n_gpu=4: .*--nproc_per_node 4", argument_problems(several, alone, 1))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    launched = SimpleNamespace(n_gpu=1, deepspeed=None, output_dir="out")
    assert_said(r"deepspeed is set: .* Leave it out", argument_problems(launched, alone, 1))
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    launched.output_dir = "out\udcff"
    assert_said(r"output_dir '.*out\\udcff': the path has", argument_problems(launched, alone, 1))
    state = SimpleNamespace(parallelism_config=None, fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator = SimpleNamespace(state=state, is_fsdp2=False)
    assert_said(r"fsdp_version=1: .*\"version\": 2", accelerator_problems(accelerator, 1))


def test_a_trainer_that_is_not_known_is_refused() -> None:
    unknown = type("GKDTrainer", (), {"__module__": "trl.experimental.gkd"})()
    unknown.data_collator = unknown.lr_scheduler = None
    (problem,) = trainer_problems(unknown, LongContextConfig())
    assert re.match(r"GKDTrainer of TRL: .* SFTTrainer, and transformers' Trainer", problem)


@pytest.mark.parametrize(("name", "is_refused"), [("DPOTrainer", True), ("SFTTrainer", False)])
def test_a_trainer_that_compares_with_full_attention_does_not_shift_groups(
    name: str, is_refused: bool
) -> None:
    known = type(name, (), {"__module__": "trl"})()
    known.data_collator = known.lr_scheduler = None
    problems = list(trainer_problems(known, LongContextConfig(shifted_group=64)))
    assert [p.split(":")[0] for p in problems] == [f"shifted_group=64 with {name}"] * is_refused


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"cp_size": 2}, "cp_size=2: transformers would shard"),
        ({"tp_size": 0}, "tp_size=0: a size is 1 or more"),
        ({"sp_size": 2}, "sp_size=2"),
    ],
)
def test_the_axis_refuses_other_kinds_of_parallelism(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        TrainerParallelism(**sizes)


def test_the_axis_fits_the_world() -> None:
    config = LongContextConfig(ulysses_degree=2, ring_degree=2)
    assert trainer_parallelism(config, 8).dp_replicate_size == 2
    sharded = trainer_parallelism(config, 16, dp_shard_size=2)
    assert (sharded.dp_replicate_size, sharded.dp_shard_size, sharded.tp_size) == (2, 2, 4)
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        trainer_parallelism(config, 6)
    with pytest.raises(ValueError, match=r"x 4 ranks per sequence = 16, but 8 processes run"):
        trainer_parallelism(config, 8, dp_shard_size=2, dp_replicate_size=2)


def test_a_reference_computed_beside_a_dataset_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory, on_disk = SimpleNamespace(cache_files=[]), SimpleNamespace(cache_files=["a.arrow"])
    assert not list(refusals.shared_cache_problems(in_memory)), "one process finds its own folder"
    monkeypatch.setattr(refusals, "num_processes", lambda: 2)
    (problem,) = refusals.shared_cache_problems(in_memory)
    assert "precompute_ref_log_probs with a dataset in memory" in problem
    assert "load_from_disk" in problem
    assert not list(refusals.shared_cache_problems(on_disk))


@pytest.mark.parametrize("mixin", [LongContextTrainerMixin, LongContextTrainer])
def test_a_trainer_before_the_mixin_is_refused(mixin: type) -> None:
    trainer = type("MyTrainer", (Trainer,), {})
    with pytest.raises(TypeError, match=r"class Long\(LongContextTrainerMixin, MyTrainer\)"):
        type("Long", (trainer, mixin), {})
    type("Long", (LongContextTrainerMixin, trainer), {})


def test_ligers_fused_loss_is_refused_and_its_layers_are_not() -> None:
    args = SimpleNamespace(
        use_liger_kernel=True, liger_kernel_config=None, label_smoothing_factor=0.0
    )
    args.prediction_loss_only = False
    trainer = SimpleNamespace(
        args=args, data_collator=None, lr_scheduler=None, compute_loss_func=None
    )
    (problem,) = trainer_problems(trainer, RING)
    assert "use_liger_kernel=True with its fused cross entropy" in problem
    args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    assert not list(trainer_problems(trainer, RING))


def test_an_argument_that_went_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r"max_loss_spike is no setting any more\. .*skip_bad_steps"
    ):
        LongContextTrainer(long_context=RING, max_loss_spike=5.0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing")
def test_rows_that_trl_cuts_by_default_are_told_of(tmp_path: Path) -> None:
    asked = partial(SFTConfig, str(tmp_path), use_cpu=True, bf16=False)
    assert cut_by_default(asked(max_length=None)) is None
    assert cut_by_default(asked(max_length=4096)) is None
    assert cut_by_default(TrainingArguments(str(tmp_path), use_cpu=True)) is None
    with pytest.warns(UserWarning, match=r"SFTConfig has max_length=1024, TRL's default: .*=None"):
        make_trainer(Case("alone"), tmp_path, is_patched=True, args=asked())
