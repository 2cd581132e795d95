"""Processes as a launcher starts them against one process, and how they end."""

import signal
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from peft import PeftModel
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from longctx_patch.plugin import accelerate_yaml
from longctx_patch.recipes import finetune
from longctx_patch.recipes.launch import INTERRUPTED, one_message
from longctx_patch.recipes.metrics import read_metrics
from tests.launching import start_forked
from tests.plugin.launched import run_launched
from tests.recipes.conftest import flags_of, write_documents


def finetune_and_listen(arguments: list[str]) -> str:
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        finetune.main(arguments)
    return said.getvalue()


@pytest.mark.timeout(600)
def test_two_replicas_of_two_ranks_train_as_one_process_and_resume(
    config_file: Path, tmp_path: Path
) -> None:
    """This holds although replicas have unequal numbers of tokens and some shards have none."""
    text = write_documents(tmp_path, 3, 50, 17, 64, 31, 2, 40, 8, 59, 97)
    flags = [*flags_of(model=config_file, text=text, rope="yarn"), "--one-document-per-row"]
    flags += flags_of(seq_len=97, max_steps=4, gradient_accumulation_steps=2)
    flags += flags_of(learning_rate=1e-2, save_every=2)
    finetune.main([*flags, "--batch-size", "2", "--output", str(tmp_path / "one")])
    four = [*flags, "--ulysses", "2", "--checkpoint", "attention", "--output", str(tmp_path / "4")]
    by_rank = run_launched(finetune_and_listen, 4, four)
    assert by_rank[0].count("| 0/4 [00:00<?, ?step/s]") == 1
    assert by_rank[0].count("/4 [") == 2  # at the start and at the end, as lines
    assert "\r" not in by_rank[0]
    assert not any("/4 [" in said for said in by_rank[1:])  # one process shows its progress
    whole = read_metrics(tmp_path / "4")
    for our, their in zip(whole, read_metrics(tmp_path / "one"), strict=True):
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert our[name] == pytest.approx(their[name], rel=1e-5), name

    final = tmp_path / "4" / "final"
    set_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(final))
    PeftModel.from_pretrained(base, str(final))

    (tmp_path / "4/settings.json").unlink()  # else the run has ended
    (tmp_path / "4/checkpoint-4/run.json").unlink()
    run_launched(finetune.main, 4, [*four, "--resume"])
    for repeated, before in zip(read_metrics(tmp_path / "4"), whole, strict=True):
        assert (repeated["loss"], repeated["grad_norm"]) == (before["loss"], before["grad_norm"])


def test_a_gpu_run_folder_without_its_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only accelerate.yaml sets FSDP2 and bf16; without it float32 copies would be trained."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    settings = tmp_path / "finetune.yaml"
    settings.write_text("model: m\ntext: t\nseq_len: 64\noutput: out\n")
    finetune.check_launcher(None)
    finetune.check_launcher(settings)  # a file of settings, not a run folder
    (tmp_path / "accelerate.yaml").write_text(accelerate_yaml(2, 2, fsdp=True))
    wanted = r"says distributed_type: FSDP and mixed_precision: bf16.*`accelerate launch --config_f"
    with pytest.raises(ValueError, match=wanted):
        finetune.main(["--settings", str(settings)])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    finetune.check_launcher(settings)


def test_a_refusal_is_one_message_that_the_launcher_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank in ("0", "1"):  # rank 0 ends the others before they repeat it
        failure_file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(failure_file))
        with pytest.raises(SystemExit) as ended, one_message("finetune"):
            raise ValueError("no such file")
        assert ended.value.code == 1
        assert len(waited) == int(rank)
        assert capsys.readouterr().err == "finetune: no such file\n"
        shown = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(failure_file))
        assert "traceback : finetune: no such file" in str(ChildFailedError("job", {0: shown}))


def test_a_second_ctrl_c_is_no_traceback(tmp_path: Path) -> None:
    """It came while Python was ending, and printed what was going on there."""
    process = start_forked(interrupt_twice, tmp_path / "said")
    process.join(60)
    assert process.exitcode == -signal.SIGINT
    assert (tmp_path / "said").read_text() == f"finetune: {INTERRUPTED}\n"


def interrupt_twice() -> None:
    try:
        with one_message("finetune"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def answers_ctrl_c() -> Iterator[None]:
    """As before, after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("answers_ctrl_c")
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0), (None, 1)])
def test_ctrl_c_is_one_line_of_a_job(
    rank: str | None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as ended, one_message("sft"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    said = capsys.readouterr().err.splitlines()
    assert said == [f"sft: {INTERRUPTED}"] * lines


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (DistNetworkError("the store is gone"), 1),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), 1),
        (RuntimeError("expected all tensors to be on the same device"), 0),
        (KeyError("labels"), 0),
    ],
)
def test_who_lost_another_process_lets_it_fail_first(
    error: Exception, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(type(error)) as raised, one_message("finetune"):
        raise error
    assert raised.value is error
    assert len(waited) == waits
