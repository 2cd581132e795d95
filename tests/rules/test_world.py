"""Degrees have to fit the processes of a job: every check has the same rule and wording."""

from collections.abc import Callable

import pytest
from accelerate.state import PartialState

from longctx_patch import LongContextConfig, make_sequence_group
from longctx_patch.cli.arguments import asked_degrees
from longctx_patch.plugin import SequenceParallelismConfig, accelerate_yaml, make_accelerator
from longctx_patch.rules.world import require_whole_groups

FOUR = LongContextConfig(ulysses_degree=2, ring_degree=2)


def test_multiples_pass() -> None:
    for num_processes in (4, 8, 12):
        require_whole_groups("cp_size", 4, num_processes)


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (lambda: make_accelerator(FOUR), "ulysses_degree=2 x ring_degree=2"),
        (lambda: SequenceParallelismConfig(cp_size=4).check_world(6, fsdp2=False), "cp_size"),
        (lambda: accelerate_yaml(6, 4, fsdp=True), "sequence_degree"),
        (
            lambda: asked_degrees(num_ranks=6, sequence_degree=4),
            "--sequence-degree",
        ),
    ],
)
def test_six_processes_for_degree_four(
    check: Callable[[], object], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(PartialState, "_shared_state", {})  # forget the state of other tests
    with pytest.raises(ValueError, match="must be a multiple of 4") as caught:
        check()
    text = str(caught.value)
    assert text.startswith(f"{given} = 4 ranks per sequence, but 6 process")
    assert (
        "Use 8 of them (num_processes: 8 in the YAML, --nproc_per_node of torchrun, --gpus 8"
        in text
    )
    assert "divide 6: 1, 2, 3, 6." in text


def test_a_single_process_is_told_how_to_start_more() -> None:
    with pytest.raises(ValueError, match=r"ring_degree=2 = 4 .* but 1 process runs") as caught:
        make_sequence_group(FOUR)
    for way in ("accelerate launch", "torchrun --nproc_per_node 4", "notebook_launcher", "use_cpu"):
        assert way in str(caught.value)


def test_a_patch_before_torch_distributed_is_told_what_sets_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    says = r"= 4 ranks .* isn't set up, though the launcher started 4 .* TrainingArguments\(...\)"
    with pytest.raises(ValueError, match=says):
        make_sequence_group(FOUR)
