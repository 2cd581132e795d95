"""The run folder: what is decided about a run, and the files that say so.

`decide` makes every check and writes nothing; `write` only writes.
"""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from longctx_patch.choose.search import Result
from longctx_patch.cli.degrees import DegreeChoice, choose_degrees
from longctx_patch.cli.layer_masks import describe_layers, windows_in
from longctx_patch.cli.prediction import cluster_of, prediction, prediction_rows
from longctx_patch.cli.row_degrees import degrees_for_rows
from longctx_patch.cli.run_checks import check_length, check_out, check_text, rope_types
from longctx_patch.cli.run_readme import render_readme, size_text
from longctx_patch.config import LayoutName, LongContextConfig
from longctx_patch.hf import check_model_config
from longctx_patch.hf.model.load import is_local, load_model_config
from longctx_patch.hf.model.rope import reachable_length
from longctx_patch.plugin import accelerate_yaml
from longctx_patch.predict.hardware import PRESETS
from longctx_patch.recipes import models
from longctx_patch.recipes.settings import Settings
from longctx_patch.sequence.placement import padding_multiple

SAVE_EVERY = 25
"""Steps between checkpoints, so that an interrupted run can be resumed."""

NO_TEXT = "TEXT_FILE_OR_FOLDER"
"""Stands in the command where --data was not given."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """All that the files and the summary are made of."""

    folder: Path
    settings: Settings
    model_config: Any
    """With the RoPE change."""
    old_config: Any
    degrees: DegreeChoice
    num_gpus: int
    num_nodes: int
    cpu: bool
    launch_yaml: str
    num_parameters: int
    predicted: Result | None
    """What the planner says; None where it doesn't know these GPUs or the model."""
    names_gpus: bool
    """Whether their kind was named."""

    @property
    def has_text(self) -> bool:
        return self.settings.text != [NO_TEXT]

    @property
    def fsdp(self) -> bool:
        return "distributed_type: FSDP" in self.launch_yaml

    @property
    def states_on_host(self) -> bool:
        return "fsdp_offload_params: true" in self.launch_yaml

    @property
    def data_parallel(self) -> int:
        return self.num_gpus // self.degrees.sequence_degree

    @property
    def placement(self) -> LayoutName:
        """That of the rows that are trained on."""
        config = self.settings.sequence_parallelism()
        return config.packed_placement if self.settings.pack else config.placement

    @property
    def tokens_per_gpu(self) -> int:
        config = self.settings.sequence_parallelism()
        multiple = padding_multiple(config, packed=self.settings.pack)
        padded = -(-self.settings.seq_len // multiple) * multiple
        return padded // self.degrees.sequence_degree

    @property
    def launch_command(self) -> str:
        words = ["accelerate", "launch", "--config_file", str(self.folder / "accelerate.yaml")]
        words += ["-m", "longctx_patch.recipes.finetune"]
        words += ["--settings", str(self.folder / "finetune.yaml")]
        return shlex.join(words if self.has_text else [*words, "--text", NO_TEXT])

    @property
    def verify_command(self) -> str:
        return shlex.join(["longctx", "verify", str(self.folder)])


def decide(
    model: str,
    out: Path,
    *,
    seq_len: int,
    gpus: str,
    rope: Any,
    rope_factor: float | None,
    lora: bool,
    ulysses: int | None,
    ring: int | None,
    sequence_degree: int | None,
    nodes: int,
    host_gib: float | None,
    checkpoint: Any,
    attention_kept: float,
    mlp_tiles: int | None,
    states_on_host: bool,
    dtype: Any,
    rank: int | None,
    load_in_4bit: bool,
    tokenizer: str,
    pack: bool,
    data: Sequence[str],
    cpu: bool,
) -> Decisions:
    """Check everything and choose what was left open. Changes nothing.

    Raises ValueError with the value, the rule and what to type.
    """
    folder = out.expanduser().resolve()
    check_out(out, folder)
    text = [str(Path(source).expanduser().resolve()) for source in data]
    for source in text:
        check_text(source)
    num_gpus = int(re.split(r"\D", gpus)[0])
    if rank is not None and not lora:
        raise ValueError(f"--rank {rank} with --full: it is an adapter's. Use --lora.")
    if load_in_4bit and not lora:
        raise ValueError("--load-in-4bit with --full: weights of 4 bits are frozen. Use --lora.")
    if states_on_host and (cpu or load_in_4bit):
        other = "--cpu, where all is on the host" if cpu else "--load-in-4bit, which has no FSDP2"
        raise ValueError(f"--states-on-host with {other}: use one of them.")
    cluster = cluster_of(gpus, num_gpus, nodes, host_gib=host_gib, cpu=cpu)
    config = load_model_config(model)
    check_model_config(config, LongContextConfig())
    models.check_weights(model)
    degrees = choose_degrees(
        num_ranks=num_gpus,
        num_nodes=nodes,
        num_kv_heads=config.num_key_value_heads,
        sequence_degree=sequence_degree,
        ulysses=ulysses,
        ring=ring,
    )
    check_length(config, seq_len, rope, rope_factor)
    settings = Settings(
        model=str(Path(model).expanduser().resolve()) if is_local(model) else model,
        tokenizer=tokenizer,
        text=text or [NO_TEXT],
        pack=pack,
        output=str(folder / "training"),
        seq_len=seq_len,
        rope=rope or "none",
        rope_factor=rope_factor,
        lora=lora,
        full=not lora,
        dtype=dtype or ("bfloat16" if load_in_4bit else "float32"),
        load_in_4bit=load_in_4bit,
        ulysses=degrees.ulysses,
        ring=degrees.ring,
        checkpoint=checkpoint,
        attention_kept=attention_kept,
        mlp_tiles=mlp_tiles,
        save_every=SAVE_EVERY,
        **({} if rank is None else {"lora_rank": rank}),
        **({} if cluster is None else {"hardware": cluster.gpu.hardware.name}),
    )
    scaled = models.load_config(settings)
    models.check_vocabulary(models.load_tokenizer(settings), scaled)
    if not (ulysses or ring or cpu):  # the cost model knows GPUs
        kind = PRESETS[settings.hardware] if cluster is None else cluster.gpu.hardware
        hardware = dataclasses.replace(kind, gpus_per_node=num_gpus // nodes)
        degrees = degrees_for_rows(degrees, settings, scaled, hardware, has_text=bool(text))
        settings = dataclasses.replace(
            settings, ulysses=degrees.ulysses, ring=degrees.ring, layout=degrees.layout
        )
    check_model_config(scaled, settings.sequence_parallelism())
    predicted = None if cluster is None else prediction(settings, scaled, cluster, states_on_host)
    fsdp = not (cpu or load_in_4bit)
    models.check_4bit(settings, fsdp=fsdp)
    launch_yaml = accelerate_yaml(
        num_gpus,
        degrees.sequence_degree,
        fsdp=fsdp,
        num_machines=nodes,
        cpu=cpu,
        mixed_precision="no" if cpu else "bf16",
        states_on_host=states_on_host,
    )
    return Decisions(
        folder=folder,
        settings=settings,
        model_config=scaled,
        old_config=config,
        degrees=degrees,
        num_gpus=num_gpus,
        num_nodes=nodes,
        cpu=cpu,
        launch_yaml=launch_yaml,
        num_parameters=_num_parameters(scaled),
        predicted=predicted,
        names_gpus=cluster is not None,
    )


def write(decisions: Decisions) -> None:
    """Write the files of the run folder."""
    folder = decisions.folder
    folder.mkdir(parents=True, exist_ok=True)
    decisions.model_config.to_json_file(folder / "config.json")
    (folder / "accelerate.yaml").write_text(decisions.launch_yaml, encoding="utf-8")
    (folder / "finetune.yaml").write_text(_settings_yaml(decisions), encoding="utf-8")
    (folder / "README.md").write_text(render_readme(decisions, table(decisions)), encoding="utf-8")


def table(decisions: Decisions) -> list[tuple[str, str, str]]:
    """(what, value, why) of every decision."""
    settings, degrees = decisions.settings, decisions.degrees
    reach = reachable_length(decisions.old_config)
    unit = "CPU process" if decisions.cpu else "GPU"
    random = " (random weights: a bare config)" if models.is_bare_config(settings.model) else ""
    placed = "every rank has the same share of the mask"
    if decisions.placement == "contiguous":
        placed = "windows leave ranks about the same to do, with few keys of others"
    sequences = f"{degrees.sequence_degree} of {decisions.num_gpus} per sequence"
    return [
        ("model", settings.model, f"{decisions.num_parameters:,} parameters{random}"),
        ("text", ", ".join(settings.text), "--data" if decisions.has_text else "to be given"),
        ("trained", "LoRA adapter" if settings.uses_lora else "every weight", "--lora or --full"),
        ("tokens", f"{settings.seq_len} per sequence", f"the model as published reaches {reach}"),
        ("rope", settings.rope, _rope_reason(decisions)),
        ("attention", describe_layers(decisions.model_config), _rows(settings)),
        ("degrees", f"ulysses {degrees.ulysses} x ring {degrees.ring}", degrees.reason),
        (
            "shards",
            f"{decisions.tokens_per_gpu} tokens per {unit}",
            f"{sequences}, {decisions.data_parallel} sequence(s) at once",
        ),
        (
            "layout",
            decisions.placement,
            placed if degrees.ring > 1 else "alike without a ring",
        ),
        ("checkpoint", settings.checkpoint, _CHECKPOINT_REASONS[settings.checkpoint]),
        *_attention_kept(settings.attention_kept),
        ("mlp tiles", *_mlp_tiles(settings.mlp_tiles)),
        ("weights", *_weights(decisions)),
        *prediction_rows(
            decisions.predicted,
            is_asked=decisions.names_gpus,
            is_causal=not (
                settings.pack or any(windows_in(decisions.model_config, settings.seq_len))
            ),
        ),
    ]


def render(decisions: Decisions) -> str:
    """What the command prints: the decisions and the one command."""
    rows = table(decisions)
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows]
    start = "Start it" if decisions.has_text else f"Start it, with your text for {NO_TEXT}"
    return "\n".join(
        [
            *lines,
            "",
            f"Written to {decisions.folder} (README.md says more). {start}:",
            "",
            f"  {decisions.launch_command}",
        ]
    )


_CHECKPOINT_REASONS = {
    "auto": "none, attention or offload by layer, as the GPU's memory demands (CPU: attention)",
    "none": "all activations are kept: fastest, most memory",
    "full": "each layer is recomputed, attention and its communication too: least memory",
    "attention": "each layer is recomputed except attention, which does not run twice",
    "offload": "as attention, and what layers keep is in host memory until backward",
}


def _attention_kept(share: float) -> list[tuple[str, str, str]]:
    if share == 1:
        return []
    again = f"what is left out takes {(1 - share) ** 2:.0%} of attention's forward pass again"
    return [("attention kept", f"of {share:.0%} of the tokens", f"--attention-kept: {again}")]


def _mlp_tiles(tiles: int | None) -> tuple[str, str]:
    if tiles is None:
        return "auto", "as few as keep a tile within 1/16 of the GPU's memory (CPU: 1)"
    if tiles == 1:
        return "1", "--mlp-tiles: each MLP runs over all tokens at once"
    return str(tiles), "--mlp-tiles: an MLP's intermediates exist for one tile at a time"


def _rows(settings: Settings) -> str:
    apart = "documents of a row don't see each other (--pack)"
    return apart if settings.pack else "within rows of joined text; --pack keeps documents apart"


def _rope_reason(decisions: Decisions) -> str:
    rope = decisions.model_config.rope_parameters
    if decisions.settings.rope == "none":
        return f"as published ({' and '.join(rope_types(rope))}), long enough"
    if decisions.settings.rope == "dynamic":
        return f"frozen at this length: rope_theta {rope['rope_theta']:.6g}"
    return f"factor {rope['factor']:g}"


def _weights(decisions: Decisions) -> tuple[str, str]:
    settings = decisions.settings
    if settings.load_in_4bit:
        return "4 bits (NF4)", "--load-in-4bit: frozen, a whole copy in each process"
    # FSDP2 with mixed precision makes float32 of what is trained.
    is_narrow = settings.dtype == "bfloat16" and (settings.uses_lora or not decisions.fsdp)
    dtype, width = ("bfloat16", 2) if is_narrow else ("float32", 4)
    whole = decisions.num_parameters * width
    if decisions.states_on_host:
        states = "with gradients and AdamW's states 4 times that" if not settings.uses_lora else ""
        why = f"--states-on-host: in {dtype}, a layer at a time on the GPU; {states}".rstrip("; ")
        return f"{size_text(whole)} of hosts (FSDP2)", why
    if decisions.fsdp:
        share = size_text(whole / decisions.num_gpus)
        return f"{share} per GPU (FSDP2)", f"{size_text(whole)} in {dtype} over all GPUs"
    return f"{size_text(whole)} per process", f"{dtype}, a whole copy in each"


def _num_parameters(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _settings_yaml(decisions: Decisions) -> str:
    values = dataclasses.asdict(decisions.settings)
    if not decisions.has_text:
        values["text"] = []
    head = "# Settings of longctx_patch.recipes.finetune. A flag of the same name wins.\n"
    return head + yaml.safe_dump(values, sort_keys=False)
