"""The files of a run folder, and what the command prints of it."""

import dataclasses
import json
import shlex
from importlib.resources import files

import yaml

from longctx_patch.cli.decision_table import describe_layers, table
from longctx_patch.cli.decisions import NO_TEXT, Decisions
from longctx_patch.cli.run_recipe import trl_settings
from longctx_patch.families.facts import ModelFacts
from longctx_patch.recipes.data.losses import RULE
from longctx_patch.recipes.model_card import cell
from longctx_patch.recipes.models import is_bare_config
from longctx_patch.recipes.run_record import PLAN_FILE
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
    (folder / PLAN_FILE).write_text(_plan_json(decisions), encoding="utf-8")
    (folder / "README.md").write_text(render_readme(decisions), encoding="utf-8")
    if decisions.options.nodes > 1:
        script = files("longctx_patch.recipes") / "slurm" / "run_folder.sh"
        (folder / "slurm.sh").write_bytes(script.read_bytes())


def render(decisions: Decisions) -> str:
    """Returns what the command prints: the decisions and the one command."""
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
    """Returns what the run would not train on, of the records that were read."""
    losses = decisions.losses
    lines = [f"{what} {number} {text}" for what, number, text in losses.facts()]
    if losses.are_many and not decisions.options.allow_dropped:
        lines.append(f"The run is refused if all its records are like these. {RULE}")
    if not lines:
        return []
    return [f"Of the first {losses.num_records:,} records of the data:", *lines, ""]


def _plan_json(decisions: Decisions) -> str:
    """Returns what was decided and predicted, for `longctx report`, and what starts the run."""
    memory = decisions.sharing.predicted and decisions.sharing.predicted.memory.total
    content = {"decided": table(decisions), "memory_bytes": memory}
    return json.dumps(content | {"start": decisions.start_command}, indent=2) + "\n"


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


README = """\
# Fine-tuning {model} on {seq_len} tokens

Written by `longctx patch`. Nothing was downloaded or trained yet beyond the model's config and
tokenizer.

## Start

```
{start}
```
{same}{how_to_start}
Settings can be added to the command, for example `--max-steps 10`, or `--full` to train every
weight in place of an adapter; they override `{settings_file}`. `training/` gets metrics.jsonl (one
line per step), settings.json (the settings as used), checkpoints (`{save_every} N`) and final/.

An interrupted run goes on from its newest checkpoint with `--resume`, added to its own command:
repeat the settings that you added then. A run that differs in what decides its numbers is a new
one. So is a longer run (`--max-steps`), unless its learning rate is constant (`{scheduler}`).

## Check it, look at it, use it

```
{verify}
```

trains one step of a shrunken copy on {degree} CPU process(es), cut as this run is, and compares
loss, logits and every gradient with one process.

```
{report}
```

writes one HTML page about the run, also while it goes on. {after}

```
{evaluate}
```

shows whether the newest weights use their context, beside the base model.

## What was decided

| | | why |
|---|---|---|
{table}

If memory runs out: more GPUs per sequence, a smaller `--seq-len`, more `--mlp-tiles`, or
`--checkpoint offload`, which moves what layers keep to host memory (`auto` does so where it has
to); then `--attention-kept 0.5`, and weights and optimizer on the host (`longctx patch
--states-on-host`).

Two packages make GPUs faster where they are installed, and nothing has to be set for them:
flash-attn 4 on Hopper and Blackwell (`pip install "flash-attn-4[cu13]==4.0.0b36"`; see
`longctx kernels`), and Liger Kernel (`pip install "liger-kernel>=0.8.5"`).

Checked were the model's family, that its attention ({layers}) is covered, that its {heads} query
heads and {kv_heads} key-value heads fit the degrees, that its RoPE reaches the length, and that the
tokenizer fits the vocabulary. The first training step checks that {crossing} as planned.

Not checked: {memory}that weights can be downloaded, and all of the data: `longctx data` reads it,
makes the rows that the run then finds, and shows some.

## Rows

{rows}

## Files

- `accelerate.yaml`: processes and devices, for `accelerate launch`.
- `{settings_file}`: the recipe's settings. It names the model, its RoPE scaling, data and output by
  absolute paths: after moving this folder, correct them.
- `plan.json`: what was decided, for `longctx report`, and the command that starts the run.
- `config.json`: the model's config with the RoPE change. For `longctx verify` and for inference;
  training does not read it.
{slurm}"""

SLURM = "- `slurm.sh`: starts one launcher on each machine of a Slurm job.\n"

PACKED = """\
Rows are packed, best fit first, of documents that don't see each other: attention, positions and
labels stay within a document. One longer than {seq_len} tokens is split into documents of that
length and a rest."""

JOINED = """\
Rows are cut from the joined text, so a row's documents see each other. To keep them apart, add
`--pack` to the command (several documents in a row, little padding) or `--one-document-per-row`
(one, padded)."""

RECORDS = """\
Each record of the data is a row, of which the model learns {learned}. A record longer than
{seq_len} tokens is refused when the run starts, with its file and row; `--too-long cut` drops its
end, `--too-long split` makes several rows of it.{together}"""

TOGETHER = " Records are packed into rows, best fit first; those of a row don't see each other."


def render_readme(decisions: Decisions) -> str:
    """The README of the run folder."""
    settings, facts = decisions.settings, ModelFacts.of(decisions.model_config)
    folder, on_cpu = str(decisions.options.folder), decisions.options.cpu
    is_finetune = decisions.task.recipe == "finetune"
    return README.format(
        model=cell(settings.model),
        seq_len=settings.seq_len,
        start=decisions.start_command,
        same=_same(decisions),
        settings_file=decisions.settings_file,
        save_every=_save_every(decisions),
        scheduler="--scheduler" if is_finetune else "--lr-scheduler-type",
        how_to_start=_how_to_start(decisions),
        degree=decisions.sequence_degree,
        verify=shlex.join(["longctx", "verify", folder]),
        report=shlex.join(["longctx", "report", folder]),
        evaluate=shlex.join(["longctx", "eval", folder, *["--cpu"] * on_cpu]),
        after=_after(decisions),
        table="\n".join(f"| {' | '.join(map(cell, row))} |" for row in table(decisions)),
        slurm=SLURM if decisions.options.nodes > 1 else "",
        memory="" if decisions.sharing.predicted else "that memory suffices, ",
        layers=describe_layers(decisions.model_config),
        crossing=(
            "attention and recurrent states cross the ranks"
            if facts.num_recurrent
            else "attention crosses the ranks"
        ),
        rows=_rows(decisions),
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
    )


def _save_every(decisions: Decisions) -> str:
    save = "--save-every" if decisions.task.recipe == "finetune" else "--save-steps"
    return f"{save} N --eval-steps" if decisions.options.eval_data else save


def _same(decisions: Decisions) -> str:
    """The command that `longctx train` is short for."""
    if decisions.start_command == decisions.launch_command:
        return ""
    return f"\nis short for this, and starts sooner:\n\n```\n{decisions.launch_command}\n```\n"


def _rows(decisions: Decisions) -> str:
    settings, task = decisions.settings, decisions.task
    if task.recipe == "finetune":
        return PACKED.format(seq_len=settings.seq_len) if settings.pack else JOINED
    learned = "the assistant's tokens" if task.assistant_only else "its tokens (of a prompt none)"
    return RECORDS.format(
        seq_len=settings.seq_len,
        learned="the chosen answer over the rejected one" if task.recipe == "dpo" else learned,
        together=TOGETHER if settings.pack else "",
    )


def _after(decisions: Decisions) -> str:
    if is_bare_config(decisions.settings.model) or not decisions.settings.uses_lora:
        return "final/ is loaded as its README.md says."
    merge = shlex.join(["longctx", "merge", str(decisions.options.folder)])
    return f"`{merge}` merges\nthe adapter into the weights, for vLLM and plain transformers."


def _how_to_start(decisions: Decisions) -> str:
    notes = []
    if not decisions.has_text:
        notes.append(
            "Put your text (files, folders, .jsonl, datasets) where the command says TEXT."
        )
    if decisions.options.nodes > 1:
        folder, last = decisions.options.folder, decisions.options.nodes - 1
        slurm = ["sbatch", "--nodes", str(last + 1)]
        if not decisions.options.cpu:
            slurm += ["--gpus-per-node", str(decisions.options.num_gpus // (last + 1))]
        notes.append(
            "On every machine, with this folder shared: add `--machine_rank N` (0 to "
            f"{last}) and `--main_process_ip` with machine 0's name or address after "
            "`accelerate launch`. Under Slurm: "
            f"`{shlex.join([*slurm, str(folder / 'slurm.sh'), str(folder)])}`, after you have "
            "put into slurm.sh what your cluster asks for."
        )
    return "".join(f"\n{note}\n" for note in notes)
