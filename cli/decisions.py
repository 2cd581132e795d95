"""Decides for `longctx patch`: `decide` checks all and writes nothing.

`run_folder.py` writes the files that say so.
"""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longctx_patch.cli.patch_options import PatchOptions
from longctx_patch.cli.run_recipe import SAVE_EVERY, Task, check_first_records, choose_task
from longctx_patch.cli.step_sharing import Sharer, Sharing, cluster_of, degrees_of
from longctx_patch.config import LongContextConfig
from longctx_patch.families.checks import check_model_config
from longctx_patch.families.load_config import is_local, load_model_config
from longctx_patch.families.text_part import auto_class
from longctx_patch.planner.job import Cluster
from longctx_patch.plugin import accelerate_yaml
from longctx_patch.plugin.stored_check import check_stored
from longctx_patch.recipes import models
from longctx_patch.recipes.context import read_factors
from longctx_patch.recipes.data.losses import Losses
from longctx_patch.recipes.data.sources import check_apart
from longctx_patch.recipes.models import check_not_fp8
from longctx_patch.recipes.run_record import require_new
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.layout import LayoutName

SAME_NAME = (
    *("seq_len", "rope_theta", "rope_factor", "allow_beyond_reach", "lora", "load_in_4bit"),
    *("tokenizer", "pack", "checkpoint", "attention_kept", "mlp_tiles", "mixture", "stages"),
    "also_train",
)
"""Options that are settings of the recipe, under the same name."""

NO_TEXT = "TEXT_FILE_OR_FOLDER"
"""Stands in the command where --data was not given."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Everything from which the files and the summary are made."""

    options: PatchOptions
    task: Task
    sharing: Sharing
    model_config: Any
    """The config with the RoPE change."""
    old_config: Any
    launch_yaml: str
    names_gpus: bool
    """Whether --gpus names a kind."""
    losses: Losses
    """Says what of the first records is in no row."""

    @property
    def settings(self) -> Settings:
        return self.sharing.settings

    @property
    def has_text(self) -> bool:
        return bool(self.options.data)

    @property
    def sequence_degree(self) -> int:
        """GPUs that share a row."""
        return self.settings.ulysses * self.settings.ring

    @property
    def placement(self) -> LayoutName:
        """The layout of the rows that are trained on."""
        config = self.settings.sequence_parallelism()
        return config.packed_placement if self.settings.pack else config.placement

    @property
    def tokens_per_gpu(self) -> int:
        config = self.settings.sequence_parallelism()
        multiple = config.padding_multiple(packed=self.settings.pack)
        padded = -(-self.settings.seq_len // multiple) * multiple
        return padded // self.sequence_degree

    @cached_property
    def num_parameters(self) -> int:
        import torch

        with torch.device("meta"):
            model = auto_class(self.model_config).from_config(self.model_config)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def start_command(self) -> str:
        """Returns what starts the run: `longctx train` on one machine, launchers on several."""
        if self.options.nodes > 1:
            return self.launch_command
        words = ["longctx", "train", str(self.options.folder)]
        return shlex.join(words if self.has_text else [*words, f"--{self._sources}", NO_TEXT])

    @property
    def launch_command(self) -> str:
        """Returns what starts the processes of one machine."""
        words = [
            "accelerate",
            "launch",
            "--config_file",
            str(self.options.folder / "accelerate.yaml"),
        ]
        flag = "settings" if self.task.recipe == "finetune" else "config"
        words += ["-m", f"longctx_patch.recipes.{self.task.recipe}"]
        words += [f"--{flag}", str(self.options.folder / self.settings_file)]
        return shlex.join(words if self.has_text else [*words, f"--{self._sources}", NO_TEXT])

    @property
    def _sources(self) -> str:
        return "text" if self.task.recipe == "finetune" else "data"

    @property
    def settings_file(self) -> str:
        return f"{self.task.recipe}.yaml"


def decide(model: str, options: PatchOptions) -> Decisions:
    """Check everything and choose what was left open. Changes nothing.

    Raises ValueError with the value, the rule and what to type.
    """
    require_new(options.folder)
    for sources in options.sources_by_option.values():
        check_apart(options.folder, sources)
    task = choose_task(options)
    options.check()
    cluster = cluster_of(options)
    config = load_model_config(model)
    check_model_config(config, LongContextConfig())
    models.check_weights(model)
    check_not_fp8(model, config)
    if Path(model).expanduser().is_dir():  # a hub name's files would have to be downloaded
        check_stored(model, config, options.allow_weights)
    degrees_of(options)
    settings = models.with_dtype(_settings(model, options, cluster), config, on_cpu=options.cpu)
    scaled = models.load_config(settings)
    tokenizer = models.load_tokenizer(settings)
    models.check_vocabulary(tokenizer, scaled)
    losses = check_first_records(task, options, tokenizer, scaled.vocab_size)
    sharer = Sharer(options=options, settings=settings, config=scaled, cluster=cluster)
    sharing = sharer.share()
    models.check_4bit(sharing.settings, fsdp=options.fsdp)
    return Decisions(
        options=options,
        task=task,
        sharing=sharing,
        model_config=scaled,
        old_config=config,
        launch_yaml=_launch_yaml(options, sharing.settings),
        names_gpus=cluster is not None,
        losses=losses,
    )


def _settings(model: str, options: PatchOptions, cluster: Cluster | None) -> Settings:
    given: dict[str, Any] = {name: getattr(options, name) for name in SAME_NAME}
    if options.rank is not None:
        given["lora_rank"] = options.rank
    if options.chat_template is not None:
        given["chat_template"] = str(options.chat_template)
    if cluster is not None:
        given["hardware"] = cluster.hardware.name
    return Settings(
        model=str(Path(model).expanduser().resolve()) if is_local(model) else model,
        text=options.sources or [NO_TEXT],
        eval_data=options.eval_sources,
        eval_steps=SAVE_EVERY if options.eval_data else 0,
        text_field=options.text_field,
        output=str(options.folder / "training"),
        context=options.context or 0,
        rope=options.rope or "none",
        rope_factors=read_factors(options.rope_factors),
        full=not options.lora,
        shifted_group=options.shifted_group or 0,
        dtype=options.dtype or "auto",
        save_every=SAVE_EVERY,
        allow_weights=list(options.allow_weights),
        data_shares=list(options.data_shares),
        allow_dropped=options.allow_dropped,
        **given,
    )


def _launch_yaml(options: PatchOptions, settings: Settings) -> str:
    return accelerate_yaml(
        options.num_gpus,
        settings.ulysses * settings.ring,
        fsdp=options.fsdp,
        num_machines=options.nodes,
        cpu=options.cpu,
        mixed_precision="no" if options.cpu else "bf16",
        states_on_host=options.states_on_host,
    )
