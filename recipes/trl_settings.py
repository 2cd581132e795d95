"""Settings of the recipes over TRL's trainers: ours, and all of the trainer's own.

A YAML file (`--config FILE`) and flags set both, under one name each; a flag wins. Names that
nobody knows, and values of another type, are refused.
"""

# ruff: noqa: RUF009  # setting() returns a dataclasses.field, which ruff cannot see
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import TrlParser

from longctx_patch.checkpoints.output_folder import resume_name
from longctx_patch.config import LongContextConfig
from longctx_patch.recipes.data.records import TooLong
from longctx_patch.recipes.data.unwritten import FIELDS
from longctx_patch.recipes.settings import (
    DataSettings,
    ModelSettings,
    Parallelism,
    check_shares,
    parallelism_of,
    setting,
)
from longctx_patch.recipes.settings_file import (
    SettingsParser,
    file_and_flags,
    read_settings,
    set_environment,
    with_own_output,
)
from longctx_patch.rules.names import require_choice
from longctx_patch.rules.number_rules import check_numbers
from longctx_patch.trainer.sealing import kept_problems

USUAL_MAX_LENGTH = (None, 1024, 2048)
"""Defaults of TRL's `max_length`: nobody has set it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrlSettings(Parallelism, DataSettings, ModelSettings):
    """The data, and what the trainer of TRL has no setting for."""

    data: list[str] = setting(
        "files (.jsonl, .json, .csv, .parquet, .arrow, texts), folders, globs, saved datasets, "
        "hub names; SOURCE:SPLIT, OWNER/NAME@REVISION:CONFIG/SPLIT",
        default=[],
    )
    eval_share: float = setting("part of the rows held out to evaluate on", default=0.0)
    too_long: TooLong = setting(
        "records longer than seq_len: refuse, cut (drop the end) or split", default="refuse"
    )
    may_leave_out: list[str] = setting(
        f"fields that the chat template need not write: {', '.join(FIELDS)}", default=[]
    )
    split_special_tokens: bool = setting(
        "special tokens that records write themselves are read as letters", default=False
    )
    streaming: bool = setting("make rows while reading, no table on disk", default=False)
    keep_every: int = setting(
        "with save_total_limit, checkpoints of every so many steps are kept for ever", default=0
    )
    early_stopping: int = setting(
        "stop after so many evaluations without a better one; 0: never", default=0
    )

    def __post_init__(self) -> None:
        self._check_model()
        if not self.data:
            raise ValueError("data is not set. Give --data SOURCE ... or 'data:' in the settings.")
        check_shares(self.data_shares, len(self.data))
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share={self.eval_share}: a part, from 0 to below 1.")
        if self.eval_share and self.eval_data:
            raise ValueError("both eval_data and eval_share are set. Choose one.")
        if self.streaming and (self.eval_share or self.data_shares):
            raise ValueError(
                "streaming with eval_share or data_shares, which need the number of rows. Give "
                "eval_data, and one source; or leave out streaming."
            )
        if self.streaming and len(self.data) > 1:
            raise ValueError(
                f"streaming with {len(self.data)} sources of data: a stream has one, in its order. "
                "Give one folder or glob, or leave out streaming."
            )
        require_choice("too_long", self.too_long, get_args(TooLong))
        for name in self.may_leave_out:
            require_choice("may_leave_out", name, FIELDS)
        self._check_at_least("early_stopping", 0)
        object.__setattr__(self, "resume", resume_name(self.resume))
        check_numbers(self)
        self.sequence_parallelism()

    def sequence_parallelism(self) -> LongContextConfig:
        """The settings as the config that `patch` takes."""
        return parallelism_of(self)

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_data or self.eval_share)


class _Parser(SettingsParser, TrlParser):
    """TRL's parser, with our errors."""


def settings_parser(config_class: type) -> SettingsParser:
    """The parser of a recipe's flags, with those of TRL's `config_class`."""
    parser = _Parser((TrlSettings, config_class), allow_abbrev=False)
    parser.set_defaults(gradient_checkpointing=False)  # TRL's True; `checkpoint` says it here
    return parser


def kinds_of(config_class: type) -> dict[str, Any]:
    """The type of each setting that a file may have."""
    return get_type_hints(config_class) | get_type_hints(TrlSettings) | {"env": dict}


def parse(config_class: type, arguments: Sequence[str] | None = None) -> tuple[TrlSettings, Any]:
    """(our settings, the trainer's own) of flags and of the file that `--config` names.

    Raises ValueError for what can't be right, naming the value, the rule and the fix.
    """
    file, flags = file_and_flags("--config", arguments)
    flags = with_own_output(flags, "output_dir")
    parser: Any = settings_parser(config_class)
    if file:
        values = read_settings(file, kinds_of(config_class))
        set_environment(values)
        parser.set_defaults_with_config(**values)
    if unknown := parser.parse_known_args(flags)[1]:
        parser.refuse_unknown(unknown, "--config")
    with _explained():
        settings, args = parser.parse_args_into_dataclasses(flags)
    check_together(settings, args)
    check_numbers(args)
    args.max_length = settings.seq_len if getattr(args, "packing", False) else None
    return settings, args


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to type where transformers says only that evaluations and checkpoints don't fit."""
    try:
        yield
    except ValueError as error:
        if "load_best_model_at_end" not in str(error):
            raise
        raise ValueError(
            f"{error} Run folders keep the best step, which has to be evaluated and saved: give "
            "--save_steps too, a multiple of --eval_steps; or --load_best_model_at_end false."
        ) from error


def check_together(settings: TrlSettings, args: Any) -> None:
    """Raise ValueError for settings of both that exclude each other, and for missing trackers."""
    if not args.output_dir or args.output_dir == "trainer_output":
        raise ValueError("output_dir is not set. Give --output_dir FOLDER or 'output_dir:'.")
    if args.max_length not in (*USUAL_MAX_LENGTH, settings.seq_len):
        raise ValueError(
            f"max_length={args.max_length} with seq_len={settings.seq_len}: seq_len alone says how "
            "long rows are. Leave max_length out."
        )
    if args.eval_strategy != "no" and not settings.evaluates:
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value} without anything to evaluate on. Give "
            "eval_data, or eval_share: 0.02."
        )
    if settings.streaming and args.max_steps < 1:
        raise ValueError("streaming without max_steps: a stream has no known end. Give max_steps.")
    if settings.early_stopping and not args.load_best_model_at_end:
        raise ValueError(
            f"early_stopping={settings.early_stopping} without load_best_model_at_end: true, which "
            "says that the best evaluation counts."
        )
    if args.gradient_checkpointing_kwargs and not args.gradient_checkpointing:
        raise ValueError(
            f"gradient_checkpointing_kwargs={args.gradient_checkpointing_kwargs} without "
            "gradient_checkpointing: true: `checkpoint` alone says what is recomputed (it is "
            f"{settings.checkpoint}). Leave them out, or give both with checkpoint: none."
        )
    if args.push_to_hub and not args.hub_model_id:
        raise ValueError(
            "push_to_hub without hub_model_id: say where the model goes. Give --hub_model_id "
            "USER/NAME."
        )
    for problem in kept_problems(args, settings.keep_every):
        raise ValueError(problem)
    for name in args.report_to:
        _check_tracker(name)


def _check_tracker(name: str) -> None:
    require_choice("report_to", name, ["none", *INTEGRATION_TO_CALLBACK])
    try:
        INTEGRATION_TO_CALLBACK[name]()
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"report_to: {name}: {error}") from error
