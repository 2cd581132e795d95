"""The files of a run folder, and what the command prints of it."""

import dataclasses
import json
import shlex
from importlib.resources import files

import yaml

from longctx_patch.cli.decision_table import table
from longctx_patch.cli.decisions import NO_TEXT, Decisions
from longctx_patch.cli.run_readme import render_readme
from longctx_patch.cli.run_recipe import trl_settings
from longctx_patch.recipes.data.losses import RULE
from longctx_patch.rules.text_table import aligned

TRL_HEAD = (
    "# Settings of longctx_patch.recipes.{}, and of TRL's trainer. A flag of the same name wins.\n"
)


def write(decisions: Decisions) -> None:
    """Write the files of the run folder."""
    folder = decisions.options.folder
    folder.mkdir(parents=True, exist_ok=True)
    decisions.model_config.to_json_file(folder / "config.json")
    if template := decisions.options.chat_template:
        decisions.options.own_template.write_bytes(template.read_bytes())
    (folder / "accelerate.yaml").write_text(decisions.launch_yaml, encoding="utf-8")
    (folder / decisions.settings_file).write_text(_settings_yaml(decisions), encoding="utf-8")
    (folder / "plan.json").write_text(_plan_json(decisions), encoding="utf-8")
    (folder / "README.md").write_text(render_readme(decisions), encoding="utf-8")
    if decisions.options.nodes > 1:
        script = files("longctx_patch.recipes") / "slurm" / "run_folder.sh"
        (folder / "slurm.sh").write_bytes(script.read_bytes())


def render(decisions: Decisions) -> str:
    """What the command prints: the decisions and the one command."""
    start = "Start it" if decisions.has_text else f"Start it, with your text for {NO_TEXT}"
    written = f"Written to {decisions.options.folder} (README.md says more). {start}:"
    look = []
    if decisions.has_text:
        data = shlex.join(["longctx", "data", str(decisions.options.folder)])
        look = [f"To see what the model will learn: {data}"]
    faster = [decisions.sharing.faster] if decisions.sharing.faster else []
    lines = [*aligned(table(decisions)), "", *_lost(decisions), *faster, *look, written]
    return "\n".join([*lines, "", f"  {decisions.start_command}"])


def _lost(decisions: Decisions) -> list[str]:
    """What the run would not train on, of the records that were read."""
    losses = decisions.losses
    lines = [f"{what} {number} {text}" for what, number, text in losses.facts()]
    if losses.are_many and not decisions.options.allow_dropped:
        lines.append(f"The run is refused if all its records are like these. {RULE}")
    if not lines:
        return []
    return [f"Of the first {losses.num_records:,} records of the data:", *lines, ""]


def _plan_json(decisions: Decisions) -> str:
    """What was decided and predicted, for `longctx report`."""
    memory = decisions.sharing.predicted and decisions.sharing.predicted.memory.total
    content = {"decided": table(decisions), "memory_bytes": memory}
    return json.dumps(content, indent=2) + "\n"


def _settings_yaml(decisions: Decisions) -> str:
    own = {"chat_template": str(decisions.options.own_template)}
    own = own if decisions.options.chat_template else {}
    if decisions.task.recipe != "finetune":
        values = trl_settings(decisions.task, decisions.options, decisions.settings) | own
        return TRL_HEAD.format(decisions.task.recipe) + yaml.safe_dump(values, sort_keys=False)
    # `auto` stays, so that --full, if added to the command later, chooses its own dtype.
    values = dataclasses.asdict(decisions.settings) | {"dtype": decisions.options.dtype or "auto"}
    values |= own
    if not decisions.has_text:
        values["text"] = []
    head = "# Settings of longctx_patch.recipes.finetune. A flag of the same name wins.\n"
    return head + yaml.safe_dump(values, sort_keys=False)
