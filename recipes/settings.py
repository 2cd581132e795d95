"""Settings of the fine-tuning recipe: one frozen dataclass, filled from a YAML file and from flags.

A key of the YAML file is the name of a field, a flag is the same name with dashes
(`max_steps: 100`, `--max-steps 100`); a flag wins over the file, `--full` over its `lora` too, and
the other way round. Relative paths are taken from the current directory. Checks that need nothing
but the values are made here.
"""

# ruff: noqa: RUF009  # setting() returns a dataclasses.field, which ruff cannot see
import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from transformers import HfArgumentParser

from longctx_patch import LongContextConfig
from longctx_patch.hf.layers.fused_layers import FusedLayersName
from longctx_patch.names import require_choice

RopeName = Literal["none", "linear", "dynamic", "yarn"]
DtypeName = Literal["float32", "bfloat16", "float16"]
SchedulerName = Literal["cosine", "linear", "constant", "constant_with_warmup"]
OPPOSITES = {"lora": "full", "full": "lora"}
"""Of these settings one flag takes back the other in the file."""


def setting(help_text: str, *, default: Any) -> Any:
    """A dataclass field with the line that `--help` prints."""
    metadata = {"help": help_text}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a fine-tuning run, except what belongs to `accelerate launch`."""

    # What is trained, on what, to where
    model: str = setting("hub name, local folder, or config.json (random weights)", default="")
    tokenizer: str = setting("name or folder if not the model's own; 'bytes'", default="")
    text: list[str] = setting("text files, folders, globs, .jsonl files, datasets", default=[])
    text_field: str = setting("name of the text field in JSONL and datasets", default="text")
    one_document_per_row: bool = setting("rows never join two documents", default=False)
    pack: bool = setting("rows are packed of documents that don't see each other", default=False)
    output: str = setting("folder to write, empty or new", default="")
    resume: bool = setting("go on from the newest checkpoint in the output", default=False)

    # Model
    seq_len: int = setting("tokens per row, over all ranks together", default=0)
    rope: RopeName = setting("RoPE scaling that reaches seq_len", default="none")
    rope_factor: float | None = setting("factor of the scaling, if not the ratio", default=None)
    dtype: DtypeName = setting("dtype that the weights are loaded in", default="float32")
    load_in_4bit: bool = setting("an adapter's frozen weights in 4 bits (NF4)", default=False)
    fused_layers: FusedLayersName = setting(
        "RMSNorm, RoPE and SwiGLU by liger or compile; auto: liger where it fits", default="auto"
    )
    lora: bool = setting("train a LoRA adapter (the default)", default=False)
    full: bool = setting("train every weight", default=False)
    lora_rank: int = setting("rank of the adapter", default=16)
    lora_alpha: float = setting("scale of the adapter, divided by its rank", default=32.0)
    lora_dropout: float = setting("dropout before the adapter", default=0.0)
    lora_targets: list[str] = setting("module names, or all-linear", default=["all-linear"])

    # Sequence parallelism: see LongContextConfig
    ulysses: int = setting("ranks that exchange heads for tokens", default=1)
    ulysses_waves: int | None = setting(
        "parts in which heads are exchanged, if not as many as the cost model says", default=None
    )
    ring: int = setting("ranks that pass key-value blocks round", default=1)
    layout: str = setting("placement of tokens; auto: that of the plan", default="auto")
    plan: str = setting("schedule of the ring; auto: the cost model's", default="auto")
    backward_plan: str = setting("schedule of backward; auto: the cost model's", default="auto")
    ranks_per_node: int | None = setting("ring ranks per machine, for double_ring", default=None)
    hardware: str = setting("what auto chooses for: a100, h100 or h200", default="h100")
    kernel: str = setting("attention kernel; auto: the fastest that fits", default="auto")
    deterministic: bool = setting("attention sums in a fixed order on GPUs too", default=False)
    loss: str = setting("chunked, or logits: from all logits at once", default="chunked")
    checkpoint: str = setting(
        "none, full, attention, offload, or auto: as the memory demands", default="auto"
    )
    attention_kept: float = setting(
        "share of the tokens whose attention layers keep; others' is computed again", default=1.0
    )
    mlp_tiles: int | None = setting(
        "tiles in which MLPs run, if not as few as the memory takes", default=None
    )
    skip_rehearsal: bool = setting(
        "start without finding out first whether a step fits", default=False
    )

    # Optimisation
    learning_rate: float = setting("peak learning rate", default=1e-4)
    scheduler: SchedulerName = setting("course of the learning rate", default="cosine")
    warmup_steps: int = setting("steps of linear warm-up", default=0)
    weight_decay: float = setting("AdamW's weight decay", default=0.0)
    max_steps: int = setting("optimizer steps", default=100)
    batch_size: int = setting("rows per data-parallel replica and forward", default=1)
    gradient_accumulation_steps: int = setting("forwards per optimizer step", default=1)
    max_grad_norm: float = setting("clip to this gradient norm; 0 never clips", default=1.0)
    seed: int = setting("seed of weights, row order and dropout", default=0)
    save_every: int = setting("steps between checkpoints; 0 saves at the end only", default=0)

    def __post_init__(self) -> None:
        for name in ("model", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set. Give --{name} or '{name}:' in the settings.")
        if not self.text:
            raise ValueError("text is not set. Give --text FILE_OR_FOLDER ... or 'text:'.")
        if self.seq_len < 2:
            raise ValueError(
                f"seq_len={self.seq_len}: a row needs 2 tokens or more, one to read and one to "
                "predict. Give --seq-len, for example --seq-len 32768."
            )
        if self.lora and self.full:
            raise ValueError("both lora and full are set. Choose one: --lora or --full.")
        if self.load_in_4bit and (self.full or self.dtype == "float32"):
            how = "full" if self.full else f"dtype={self.dtype}"
            raise ValueError(
                f"load_in_4bit with {how}: weights of 4 bits are frozen, and computed in 16. Use "
                "--lora --dtype bfloat16."
            )
        if self.pack and self.one_document_per_row:
            raise ValueError(
                "both pack and one_document_per_row are set: packed rows hold several documents, "
                "which don't see each other either. Choose one: --pack wastes less on padding."
            )
        for name in ("rope", "dtype", "fused_layers", "scheduler"):
            self._check_choice(name)
        for name in ("lora_rank", "max_steps", "batch_size", "gradient_accumulation_steps"):
            self._check_at_least(name, 1)
        for name in ("warmup_steps", "save_every", "max_grad_norm", "learning_rate"):
            self._check_at_least(name, 0)
        if self.scheduler == "constant" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} with scheduler=constant, which has none. "
                "Use --scheduler constant_with_warmup."
            )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout}: a share, from 0 to below 1.")
        self.sequence_parallelism()

    @property
    def uses_lora(self) -> bool:
        """LoRA unless `full` was asked for."""
        return not self.full

    def sequence_parallelism(self) -> LongContextConfig:
        """The part of the settings that the patch takes."""
        return LongContextConfig(
            ulysses_degree=self.ulysses,
            ulysses_waves=self.ulysses_waves,
            ring_degree=self.ring,
            # Checked by LongContextConfig.
            layout=None if self.layout == "auto" else self.layout,  # type: ignore[arg-type]
            plan=self.plan,  # type: ignore[arg-type]
            backward_plan=self.backward_plan,  # type: ignore[arg-type]
            ranks_per_node=self.ranks_per_node,
            hardware=self.hardware,  # type: ignore[arg-type]
            kernel=self.kernel,
            deterministic=self.deterministic,
            loss=self.loss,  # type: ignore[arg-type]
            checkpoint=self.checkpoint,  # type: ignore[arg-type]
            attention_kept=self.attention_kept,
            mlp_tiles=self.mlp_tiles,
        )

    def _check_choice(self, name: str) -> None:
        choices = get_args(type(self).__annotations__[name])
        require_choice(name, getattr(self, name), choices)

    def _check_at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{name}={getattr(self, name)}: it must be {least} or more.")


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read flags (default: `sys.argv`) over the file that `--settings` names, if any.

    Raises ValueError for what cannot be right, naming the value, the rule and the fix.
    """
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file_parser.add_argument("--settings", help="YAML file with these settings; flags win over it")
    found, flags = file_parser.parse_known_args(arguments)
    parser = HfArgumentParser(
        Settings, parents=[file_parser], allow_abbrev=False, prog="longctx_patch.recipes.finetune"
    )
    if found.settings:
        asked = vars(parser.parse_args(flags))
        from_file = read_settings_file(Path(found.settings))
        taken_back = {name for name, opposite in OPPOSITES.items() if asked[opposite]}
        parser.set_defaults(**{k: v for k, v in from_file.items() if k not in taken_back})
    values = vars(parser.parse_args(flags))
    values.pop("settings")
    return Settings(**values)


def read_settings_file(path: Path) -> dict[str, Any]:
    """The file's keys and values, each of the type of its field."""
    if not path.is_file():
        raise ValueError(f"--settings {path}: no such file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not lines of 'name: value'.")
    known = Settings.__annotations__
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ValueError(
            f"{path}: unknown settings {', '.join(map(str, unknown))}. Known: {', '.join(known)}."
        )
    return {key: _typed(path, key, value, known[key]) for key, value in content.items()}


def _typed(path: Path, key: str, value: Any, wanted: Any) -> Any:
    """`value` as the field's type; YAML 1.1 reads 1e-4 as a string and a lone path as no list."""
    kinds = [kind for kind in get_args(wanted) if kind is not type(None)]
    if get_origin(wanted) is list:
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if get_origin(wanted) is Literal:
        return value
    if value is None and type(None) in get_args(wanted):
        return None
    kind = kinds[0] if kinds else wanted
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) is not kind:
        raise ValueError(f"{path}: {key}: {value!r} should be of type {kind.__name__}.")
    return value
