"""Settings of the fine-tuning recipe: one frozen dataclass, filled from a YAML file and from flags.

A key of the YAML file is the name of a field, a flag is the same name with dashes
(`max_steps: 100`, `--max-steps 100`). A flag overrides the file; `--full` also overrides `lora` in
the file, and `--lora` overrides `full`. Relative paths are taken from the current directory. Checks
that need only the values are made here.
"""

# ruff: noqa: RUF009  # setting() returns a dataclasses.field, which ruff cannot see
import ast
import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from longctx_patch.checkpoints.output_folder import ResumeName, resume_name
from longctx_patch.config import LongContextConfig
from longctx_patch.evaluation.tasks import TASKS
from longctx_patch.health.finite import check_guard_settings
from longctx_patch.health.progress import TimeLimits
from longctx_patch.hf.layers.fused_layers import FusedLayersName
from longctx_patch.recipes.also_train import ALSO_TRAINED, also_trained
from longctx_patch.recipes.context import ContextSettings
from longctx_patch.recipes.lengths import LengthStage, read_stages, stages_text
from longctx_patch.recipes.mixture import read_mixture
from longctx_patch.recipes.settings_file import (
    SettingsParser,
    file_and_flags,
    read_settings,
    setting,
    with_own_output,
)
from longctx_patch.recipes.yaml_file import read_yaml
from longctx_patch.rules.names import require_choice
from longctx_patch.rules.number_rules import check_numbers

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
SchedulerName = Literal["cosine", "linear", "constant", "constant_with_warmup"]
OPPOSITES = {"lora": "full", "full": "lora"}
"""A flag of one of these settings switches the other off if the file sets it."""
SHORT_NAMES = {"ulysses_degree": "ulysses", "ring_degree": "ring"}
"""Fields of LongContextConfig that have another name here."""
USUAL_STEPS = 100
"""Optimizer steps of a run where nothing says how many."""
OTHER_DEFAULTS = {"layout": "auto", "checkpoint": "auto"}
"""Defaults here that differ from LongContextConfig's; `auto` stands for a layout of None."""


def check_shares(shares: Sequence[float], num_sources: int) -> None:
    """Raise ValueError unless there is none, or one above 0 for each source."""
    if shares and len(shares) != num_sources:
        raise ValueError(
            f"{len(shares)} data_shares for {num_sources} sources of data: give one for each, or "
            "none."
        )
    if not all(0 < share < math.inf for share in shares):
        raise ValueError(f"data_shares={[*shares]}: each is a number above 0.")


def _parallelism_settings() -> Iterator[tuple[str, Any, Any]]:
    """(name, type, setting) of each field of LongContextConfig, with its docstring as help."""
    (source,) = ast.parse(inspect.getsource(LongContextConfig)).body
    texts = {
        field.target.id: " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(getattr(source, "body", ()))
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
        if isinstance(field.target, ast.Name)
    }
    kinds = get_type_hints(LongContextConfig)
    for field in dataclasses.fields(LongContextConfig):
        name, kind = SHORT_NAMES.get(field.name, field.name), kinds[field.name]
        # Strings, since LongContextConfig itself refuses unknown names, with the nearest one.
        is_name = any(get_origin(part) is Literal for part in (kind, *get_args(kind)))
        help_text = texts[field.name].replace("%", "%%")
        default = OTHER_DEFAULTS.get(name, field.default)
        yield name, str if is_name else kind, setting(help_text, default=default)


Parallelism: Any = dataclasses.make_dataclass(
    "Parallelism",
    list(_parallelism_settings()),
    namespace={"__doc__": "How ranks share a row.", "__module__": __name__},
    frozen=True,
    kw_only=True,
)
"""The fields of LongContextConfig as settings: a new one there is a flag and a YAML key here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The model, and how it is loaded."""

    model: str = setting("hub name, local folder, or config.json (random weights)", default="")
    tokenizer: str = setting(
        "name or folder if not the model's own; 'bytes': bytes in GPT-2's order (not by value), "
        "<eos> 256, <pad> 257",
        default="",
    )
    chat_template: str = setting("file of the chat template, if not the tokenizer's", default="")
    dtype: DtypeName = setting(
        "dtype that weights are loaded in; auto: an adapter's frozen ones as in the model's config "
        "on GPUs, else float32",
        default="auto",
    )
    load_sharded: bool = setting(
        "under FSDP2 each process reads its own rows of the weights only, from safetensors",
        default=True,
    )
    allow_weights: list[str] = setting(
        "names (or patterns: *.bias) of weights that the checkpoint may lack, so that they are "
        "random, or have beyond the model's",
        default=[],
    )
    load_in_4bit: bool = setting("an adapter's frozen weights in 4 bits (NF4)", default=False)
    fused_layers: FusedLayersName = setting(
        "RMSNorm, RoPE and SwiGLU by liger or compile; auto: liger where it fits", default="auto"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adapted(ContextSettings, _Loaded):
    """The weights that are trained."""

    lora: bool = setting("train a LoRA adapter (the default)", default=False)
    full: bool = setting("train every weight", default=False)
    lora_rank: int = setting("rank of the adapter", default=16)
    lora_alpha: float = setting("scale of the adapter, divided by its rank", default=32.0)
    lora_dropout: float = setting("dropout before the adapter", default=0.0)
    lora_targets: list[str] = setting("module names, or all-linear", default=["all-linear"])
    lora_target_parameters: list[str] = setting(
        "weights that are in no linear layer, such as experts.down_proj (PEFT's target_parameters)",
        default=[],
    )
    also_train: list[str] = setting(
        f"what is trained as a whole beside the adapter: {','.join(ALSO_TRAINED)}", default=[]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Guarded(_Adapted):
    """What ends a run, or leaves out a step."""

    skip_rehearsal: bool = setting(
        "start without finding out first whether a step fits", default=False
    )
    start_timeout: float = setting(
        "seconds from the start to the end of the first step; a job that takes longer ends",
        default=1800.0,
    )
    step_timeout: float = setting(
        "seconds of a step; 0: ten times the median step, and two minutes at least", default=0.0
    )
    save_timeout: float = setting("seconds of saving a checkpoint", default=1800.0)
    skip_bad_steps: int = setting(
        "how many steps whose loss or gradient is not finite are left out; one more ends the run",
        default=0,
    )
    sentinel_every: int = setting(
        "steps between comparisons of the sharded model with one rank alone; 0 never", default=0
    )
    library_warnings: bool = setting(
        "show too what other packages warn of and users can't change, once they are imported",
        default=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ContextEvaluated(_Guarded):
    """What is evaluated during the training."""

    max_eval_samples: int = setting(
        "most rows (in sft and dpo: records) of eval_data to evaluate on, spread over it; 0: all",
        default=0,
    )
    eval_context_steps: int = setting(
        "steps between evaluations of whether the model uses its context, and one at the end; 0: "
        "none",
        default=0,
    )
    eval_context_tasks: list[str] = setting(
        "tasks: passkey, or those of RULER that need no file", default=["passkey"]
    )
    eval_context_lengths: list[int] = setting(
        "tokens of their rows; none: seq_len and context", default=[]
    )
    eval_context_samples: int = setting("samples of each task, length and depth", default=2)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Tokens of the rows of these tasks, rising."""
        return tuple(sorted({*self.eval_context_lengths} or {self.seq_len, self.target_length}))

    def _check_at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{name}={getattr(self, name)}: it must be {least} or more.")

    def _check_context_evaluation(self) -> None:
        for name in ("eval_context_steps", "max_eval_samples"):
            self._check_at_least(name, 0)
        self._check_at_least("eval_context_samples", 1)
        tasks = [name for item in self.eval_context_tasks for name in item.split(",")]
        object.__setattr__(self, "eval_context_tasks", tasks)
        for task in tasks:
            require_choice("eval_context_tasks", task, TASKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(_ContextEvaluated):
    """Which model is trained, how much of it, and what ends the run. All recipes have these."""

    @property
    def uses_lora(self) -> bool:
        """Says whether an adapter is trained, which is so unless `full` was asked for."""
        return not self.full

    def time_limits(self) -> TimeLimits:
        """Returns how long each part of the run may take before it counts as hung."""
        return TimeLimits(
            start_s=self.start_timeout, step_s=self.step_timeout, save_s=self.save_timeout
        )

    def _check_model(self) -> None:
        self.time_limits()
        check_guard_settings(self.skip_bad_steps, self.sentinel_every)
        if not self.model:
            raise ValueError("model is not set. Give --model or 'model:' in the settings.")
        self.check_lengths()
        if self.lora and self.full:
            raise ValueError("both lora and full are set. Choose one: --lora or --full.")
        if self.load_in_4bit and (self.full or self.dtype == "float32"):
            how = "full" if self.full else f"dtype={self.dtype}"
            raise ValueError(
                f"load_in_4bit with {how}: weights of 4 bits are frozen, and computed in 16. Use "
                "--lora --dtype bfloat16."
            )
        kinds = get_type_hints(ModelSettings)
        for name in ("dtype", "fused_layers"):
            require_choice(name, getattr(self, name), get_args(kinds[name]))
        if (group := getattr(self, "shifted_group", 0)) >= self.seq_len:
            raise ValueError(
                f"shifted_group={group} with seq_len={self.seq_len}: a group holds a whole row. "
                "Give fewer tokens, a quarter of seq_len say."
            )
        self._check_at_least("lora_rank", 1)
        object.__setattr__(self, "also_train", also_trained(self.also_train))
        if self.full and self.also_train:
            raise ValueError(
                f"also_train={','.join(self.also_train)} with full: every weight is trained then. "
                "Leave it out; or --lora."
            )
        self._check_context_evaluation()
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout}: a share, from 0 to below 1.")
        if self.lora_dropout and self.lora_target_parameters:
            raise ValueError(
                f"lora_dropout={self.lora_dropout} with lora_target_parameters: PEFT has no "
                "dropout before these. Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The data and the output."""

    data_shares: list[float] = setting(
        "each source's share of all tokens; none: every row once", default=[]
    )
    eval_data: list[str] = setting(
        "sources to evaluate on, of which the split is named: SOURCE:test", default=[]
    )
    text_field: str = setting("name of the text field in records", default="text")
    allow_dropped: bool = setting(
        "train though more than 1 % of the records are in no row", default=False
    )
    # `--resume` alone is yes, and so is `resume: true` in YAML.
    resume: ResumeName = setting(
        "go on from the newest whole checkpoint in the output; auto: or start, as it finds",
        default="no",
        nargs="?",
        const="yes",
    )
    allow_change: list[str] = setting(
        "what a resumed run may change: names as the refusal says them, such as versions.torch or "
        "weights",
        default=[],
    )
    save_in_background: bool = setting(
        "train on while a checkpoint is written, where the host has memory for the copy",
        default=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Text(DataSettings):
    """The data and the output."""

    text: list[str] = setting(
        "files (.jsonl, .json, .csv, .parquet, .arrow, texts), folders, globs, saved datasets, "
        "hub names; SOURCE:SPLIT, OWNER/NAME@REVISION:CONFIG/SPLIT",
        default=[],
    )
    mixture: str = setting(
        "shares of long and short documents in the tokens, packed: prolong, olmo3, or "
        "long=0.6,short=0.4,from=16K",
        default="",
    )
    one_document_per_row: bool = setting("rows never join two documents", default=False)
    pack: bool = setting("rows are packed of documents that don't see each other", default=False)
    output: str = setting("folder to write, empty or new", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Parallelism, _Text, ModelSettings):
    """The training itself. With its bases it is everything that decides a fine-tuning run, except
    what belongs to `accelerate launch`."""

    learning_rate: float = setting("peak learning rate", default=1e-4)
    scheduler: SchedulerName = setting("course of the learning rate", default="cosine")
    warmup_steps: int = setting("steps of linear warm-up", default=0)
    weight_decay: float = setting("AdamW's weight decay", default=0.0)
    max_steps: int = setting(
        "optimizer steps; -1: 100, unless stages or num_train_epochs say it", default=-1
    )
    stages: str = setting(
        "row lengths in stages, each with its steps: 16K:200,64K:100; they decide seq_len (the "
        "longest) and max_steps",
        default="",
    )
    num_train_epochs: float = setting(
        "passes over the rows, which then decide max_steps; 0: max_steps says it", default=0.0
    )
    eval_steps: int = setting(
        "steps between evaluations on eval_data; 0: after the last step only", default=0
    )
    batch_size: int = setting("rows per data-parallel replica and forward", default=1)
    gradient_accumulation_steps: int = setting("forwards per optimizer step", default=1)
    max_grad_norm: float = setting("clip to this gradient norm; 0 never clips", default=1.0)
    seed: int = setting("seed of weights, row order and dropout", default=0)
    save_every: int = setting("steps between checkpoints; 0 saves at the end only", default=0)
    keep_last: int = setting("newest checkpoints that are kept; 0 keeps all", default=0)
    keep_every: int = setting(
        "with keep_last, checkpoints of every so many steps are kept for ever", default=0
    )
    push_to_hub: str = setting("hub name to upload final/ to at the end", default="")
    hub_private: bool = setting("the repository on the hub is made private", default=False)

    def __post_init__(self) -> None:
        self._check_stages()
        self._check_model()
        if not self.output:
            raise ValueError("output is not set. Give --output or 'output:' in the settings.")
        if not self.text:
            raise ValueError("text is not set. Give --text FILE_OR_FOLDER ... or 'text:'.")
        check_shares(self.data_shares, len(self.text))
        self._check_mixture()
        if self.pack and self.one_document_per_row:
            raise ValueError(
                "both pack and one_document_per_row are set: packed rows hold several documents, "
                "which don't see each other either. Choose one: --pack wastes less on padding."
            )
        require_choice("scheduler", self.scheduler, get_args(FIELD_TYPES["scheduler"]))
        for name in ("max_steps", "batch_size", "gradient_accumulation_steps"):
            self._check_at_least(name, 1)
        for name in ("warmup_steps", "save_every", "eval_steps"):
            self._check_at_least(name, 0)
        if not 0 <= self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs={self.num_train_epochs}: a number from 0.")
        if self.eval_steps and not self.eval_data:
            raise ValueError(
                f"eval_steps={self.eval_steps} without eval_data, which says what to evaluate on. "
                "Give --eval-data FILE_OR_FOLDER ... too."
            )
        object.__setattr__(self, "resume", resume_name(self.resume))
        self._check_kept()
        check_numbers(self)
        if self.hub_private and not self.push_to_hub:
            raise ValueError("hub_private without push_to_hub: give --push-to-hub NAME too.")
        if self.scheduler == "constant" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} with scheduler=constant, which has none. "
                "Use --scheduler constant_with_warmup."
            )
        parallelism_of(self)
        if self.stages:
            try:
                self.of_stages()
            except ValueError as error:
                raise ValueError(f"stages={self.stages!r}: {error}") from error

    def _check_stages(self) -> None:
        """Raise ValueError for stages that can't be; they decide seq_len and max_steps."""
        if not self.stages:
            if self.max_steps == -1:
                object.__setattr__(self, "max_steps", USUAL_STEPS)
            return
        stages = read_stages(self.stages)
        longest = max(stage.seq_len for stage in stages)
        for name, value, default in (
            ("seq_len", longest, 0),
            ("max_steps", stages[-1].last, -1),
            ("num_train_epochs", 0, 0),
        ):
            if getattr(self, name) not in (value, default):
                fix = f"Give {value} or leave it out" if value else "Leave it out"
                raise ValueError(
                    f"{name}={getattr(self, name)} with stages={self.stages!r}, which say it: the "
                    f"longest rows have {longest} tokens, and there are {stages[-1].last} steps. "
                    f"{fix}."
                )
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stages", stages_text(stages))

    @property
    def length_stages(self) -> tuple[LengthStage, ...]:
        """The stages of the run, one where no others are asked for."""
        if self.stages:
            return read_stages(self.stages)
        return (LengthStage(self.seq_len, 0, self.max_steps),)

    def of_stages(self) -> "list[Settings]":
        """The settings of each stage's rows and their order, which begins anew in each."""
        forwards = self.gradient_accumulation_steps
        return [
            dataclasses.replace(
                self,
                stages="",
                seq_len=stage.seq_len,
                max_steps=stage.steps,
                warmup_steps=0,
                gradient_accumulation_steps=stage.forwards(self.seq_len, forwards),
                seed=self.seed + number,
            )
            for number, stage in enumerate(self.length_stages)
        ]

    def _check_mixture(self) -> None:
        """Raise ValueError for one that can't be; rows of a mixture are packed."""
        if not self.mixture:
            return
        shortest = min(stage.seq_len for stage in self.length_stages)
        least = read_mixture(self.mixture).least_of(shortest)
        if least > shortest:
            raise ValueError(
                f"mixture={self.mixture!r}: documents are long from {least:,} tokens, and a row "
                f"holds {shortest:,}. Give a smaller from=, or longer rows: --seq-len or --stages."
            )
        for name in ("data_shares", "one_document_per_row"):
            if getattr(self, name):
                raise ValueError(
                    f"both mixture and {name} are set: a mixture weighs the documents of all "
                    "sources by their lengths, and packs them. Choose one."
                )
        object.__setattr__(self, "pack", True)

    def _check_kept(self) -> None:
        for name in ("keep_last", "keep_every"):
            self._check_at_least(name, 0)
        if self.keep_every and not self.keep_last:
            raise ValueError(
                f"keep_every={self.keep_every} without keep_last: all checkpoints are kept then. "
                "Give --keep-last N too."
            )
        if self.keep_every and self.save_every and self.keep_every % self.save_every:
            raise ValueError(
                f"keep_every={self.keep_every} with save_every={self.save_every}: no checkpoint "
                "has such a step regularly. Give a multiple of save_every."
            )

    def sequence_parallelism(self) -> LongContextConfig:
        """The settings as the config that `patch` takes."""
        return parallelism_of(self)


def parallelism_of(settings: Any) -> LongContextConfig:
    """The config that `patch` takes, of settings that have the fields of `Parallelism`."""
    values = {field: getattr(settings, SHORT_NAMES.get(field, field)) for field in CONFIG_FIELDS}
    values["layout"] = None if settings.layout == "auto" else settings.layout
    return LongContextConfig(**values)


def parallelism_in(file: Path) -> tuple[LongContextConfig, bool]:
    """Returns how a run with this settings file cuts its rows, and whether it packs them. The file
    may be that of any recipe, and may have no data yet."""
    values = read_yaml(file)
    given = {name: values[name] for name in PARALLELISM if name in values}
    packed = any(values.get(name) for name in ("pack", "packing", "mixture"))
    return parallelism_of(Parallelism(**given)), packed


CONFIG_FIELDS = [field.name for field in dataclasses.fields(LongContextConfig)]
PARALLELISM = [field.name for field in dataclasses.fields(Parallelism)]
FIELD_TYPES = {f.name: get_type_hints(Settings)[f.name] for f in dataclasses.fields(Settings)}


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read flags (default: `sys.argv`) over the file that `--settings` names, if any.

    Raises ValueError for what cannot be right, naming the value, the rule and the fix.
    """
    found, flags = file_and_flags("--settings", arguments)
    flags = with_own_output(flags, "output")
    parser = settings_parser()
    asked = vars(parser.parse_args(flags))
    if asked["num_train_epochs"] and asked["max_steps"] != -1:
        raise ValueError(
            f"--max-steps {asked['max_steps']} with --num-train-epochs "
            f"{asked['num_train_epochs']:g}: each says how many steps there are. Give one of them."
        )
    if found:
        from_file = read_settings(found, FIELD_TYPES)
        taken_back = {name for name, opposite in OPPOSITES.items() if asked[opposite]}
        taken_back |= {"max_steps"} if asked["stages"] else set()
        parser.set_defaults(**{k: v for k, v in from_file.items() if k not in taken_back})
    values = vars(parser.parse_args(flags))
    values.pop("settings")
    return Settings(**values)


def settings_parser() -> SettingsParser:
    """The parser of the recipe's flags."""
    parser = SettingsParser(Settings, allow_abbrev=False, prog="longctx_patch.recipes.finetune")
    parser.add_argument("--settings", help="YAML file with these settings; flags win over it")
    return parser


def settings_file(arguments: Sequence[str] | None = None) -> Path | None:
    """The file that `--settings` names."""
    return file_and_flags("--settings", arguments)[0]
