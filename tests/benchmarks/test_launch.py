"""What the scripts share: options, reports, and jobs that end without help."""

from pathlib import Path
from typing import Any

import attention
import launch
import lora
import pytest
import step
from config_text import config_of, name_of, options_of

from longctx_patch import LongContextConfig
from longctx_patch.memory.allocator import SETTING


def test_options_on_the_command_line() -> None:
    text = "ulysses=2,ring=2,checkpoint=none,deterministic=true"
    assert options_of(text)["deterministic"] is True
    assert config_of(text) == LongContextConfig(
        ulysses_degree=2, ring_degree=2, checkpoint="none", deterministic=True
    )
    assert config_of(name_of({"ulysses_degree": 4, "plan": "auto"})).ulysses_degree == 4
    with pytest.raises(ValueError, match="'ulysses' has no value"):
        options_of("ulysses")
    with pytest.raises(ValueError, match="Name fields of LongContextConfig"):
        config_of("ulises=4")


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        (attention, "--masks nonsense", "invalid choice: 'nonsense'"),
        (attention, "--heads 8", "write query/key-value heads, such as 32/8"),
        (attention, "--configs waves=1", "Name fields of LongContextConfig"),
        (step, "--systems nosuch", "name one of ours, stock, accelerate_cp, alst"),
        (step, "--systems ours:waves", "has no value"),
        (lora, "--systems nosuch", "name ours, ours_fsdp2"),
    ],
)
def test_what_is_mistyped_is_refused_before_any_launch(
    script: Any, options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        script.main(["--out", str(tmp_path / "out"), *options.split()])
    assert said in f"{refusal.value} {capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()


def test_a_job_that_hangs_or_fails_ends_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'hang': time.sleep(60)\n"
        "if os.environ['RANK'] == '1': raise ValueError('of rank 1')\n"
        "if sys.argv[1] == 'wait': time.sleep(60)\n"
    )
    hung = launch.run_job(script, ["hang"], 2, 0.5, tmp_path / "hung")
    assert hung.problem == "ended at its time limit of 0.5 s; rank 0 said last: nothing"
    failed = launch.run_job(script, ["fail"], 2, 30.0, tmp_path / "failed")
    assert failed.problem == "rank 1 ended with 1: ValueError: of rank 1"
    assert failed.seconds < launch.GRACE_S
    late = launch.run_job(script, ["fail"], 2, launch.Budget(0.0).limit_s(30.0), tmp_path / "late")
    assert "--budget-s" in (late.problem or "")


def test_every_job_has_segments_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers' jobs get the allocator setting too, which `make_accelerator` makes for ours."""
    assert launch.ALLOCATOR == SETTING
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nassert os.environ['PYTORCH_ALLOC_CONF'] == sys.argv[1]")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert launch.run_job(script, [SETTING], 1, 30.0, tmp_path / "a").problem is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert launch.run_job(script, ["max_split_size_mb:64"], 1, 30.0, tmp_path / "b").problem is None


def test_packages_that_one_job_sees(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").touch()
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text("import only_here")
    assert launch.run_job(script, [], 1, 30.0, tmp_path / "a", str(tmp_path)).problem is None
    without = launch.run_job(script, [], 1, 30.0, tmp_path / "b")
    assert "No module named 'only_here'" in (without.problem or "")
