"""The options of the command line. Adding one is a decision: extend these lists with it."""

from longctx_patch.cli.main import main
from tests.cli.conftest import Run

FAMILIES = ["--json", "--markdown"]
KERNELS = ["--json", "--measure"]
PATCH = [
    *("model", "--seq-len", "--gpus", "--out", "--rope", "--rope-factor", "--lora", "--ulysses"),
    *("--ring", "--sequence-degree", "--nodes", "--host-gib", "--checkpoint", "--attention-kept"),
    *("--mlp-tiles", "--states-on-host", "--dtype", "--rank", "--load-in-4bit", "--tokenizer"),
    *("--pack", "--data", "--cpu"),
]
PLAN = [
    *("model", "--gpus", "--seq-len", "--lora", "--rank", "--dtype"),
    *("--load-in-4bit", "--stock-layers", "--host-gib", "--max-seq-len", "--json", "--png"),
]
SCHEDULE = [
    "model",
    *("--plan", "--compare", "--ranks", "--direction", "--ulysses", "--ranks-per-node", "--heads"),
    *("--kv-heads", "--head-dim", "--seq-len", "--batch", "--document-tokens", "--window"),
    *("--hardware", "--out", "--json"),
]
VERIFY = [
    *("target", "--nproc", "--ulysses", "--ring", "--layout", "--dtype", "--seq-len"),
    *("--checkpoint", "--packed", "--json"),
]


def options(command: str) -> list[str]:
    return [parameter.opts[0] for parameter in main.commands[command].params]


def test_every_option_was_decided_on() -> None:
    assert sorted(main.commands) == ["families", "kernels", "patch", "plan", "schedule", "verify"]
    assert options("families") == FAMILIES
    assert options("kernels") == KERNELS
    assert options("patch") == PATCH
    assert options("plan") == PLAN
    assert options("schedule") == SCHEDULE
    assert options("verify") == VERIFY


def test_help_and_version(run: Run) -> None:
    for words in (["--help"], ["patch", "-h"], ["verify", "--help"], ["--version"]):
        result = run(*words)
        assert result.exit_code == 0
        assert result.output


def test_wrong_usage_is_exit_code_2(run: Run) -> None:
    for words in (["patch", "m"], ["verify", "m", "--layout", "spiral"], ["train"]):
        assert run(*words).exit_code == 2
