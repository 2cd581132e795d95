"""The table of a run folder: what was decided, and why."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from longctx_patch.cli.decisions import Decisions
from longctx_patch.cli.step_sharing import why_unpredicted
from longctx_patch.families.facts import ModelFacts, Reach
from longctx_patch.families.family import RECURRENT, SINKS
from longctx_patch.families.recurrent_layers import kernel_packages
from longctx_patch.families.rope import chosen_theta
from longctx_patch.families.rope_facts import describe_change, reach_problem, reachable_length
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.call.kernel_faults import TRUSTS_MENDED
from longctx_patch.memory.policies import POLICIES
from longctx_patch.planner.search import usable_bytes
from longctx_patch.recipes import models
from longctx_patch.recipes.mixture import read_mixture
from longctx_patch.recipes.run_record import WEIGHT_FILES
from longctx_patch.recipes.settings import Settings
from longctx_patch.rules.text_table import size_text

TO_INSTALL = {
    "flash-linear-attention": f"'flash-linear-attention>={TRUSTS_MENDED}' tilelang",
}
"""What pip is given for a package: without tilelang, gated delta rules are refused on Hopper GPUs
with the Triton of torch 2.11."""


Row = tuple[str, str, str]
"""(what, value, why)"""


def table(decisions: Decisions) -> list[Row]:
    """Every decision, and why."""
    parts = (_of_model(decisions), _of_rows(decisions), _of_ranks(decisions))
    rows = [*chain(*parts, _of_memory(decisions.settings))]
    return [*rows, ("weights", *_weights(decisions)), *_prediction_rows(decisions)]


def _of_model(decisions: Decisions) -> Iterator[Row]:
    settings = decisions.settings
    random = ""
    if models.is_bare_config(settings.model):
        folder = Path(settings.model).parent
        beside = any(next(folder.glob(name), None) for name in WEIGHT_FILES)
        instead = ", NOT those beside it, which its folder would give" * beside
        random = f" (random weights: a bare config{instead})"
    yield "model", settings.model, f"{decisions.num_parameters:,} parameters{random}"
    if (whole := models.whole_config(settings.model)) is not None:
        why = f"{whole.model_type} reads them: its text model is trained, and is what final/ holds"
        yield "images", "left out", f"{why} (docs/how-to/images.md puts it back)"
    yield "data", ", ".join(settings.text), "--data" if decisions.has_text else "to be given"
    if settings.mixture:
        found = read_mixture(settings.mixture)
        why = f"of the tokens; long from {found.least_of(settings.seq_len):,}"
        shares = f"long {found.long:.0%}, short {found.short:.0%}"
        yield "mixture", shares, f"{why} ({found.source or '--mixture'})"
    if sources := decisions.options.eval_sources:
        yield "evaluation", ", ".join(sources), "--eval-data"
    yield "recipe", *_recipe(decisions)
    trained = "LoRA adapter" if settings.uses_lora else "every weight"
    yield "trained", ", ".join([trained, *settings.also_train]), "--lora or --full"


def _of_rows(decisions: Decisions) -> Iterator[Row]:
    settings, reach = decisions.settings, reachable_length(decisions.old_config)
    reaches = "any length" if reach is None else f"{reach}"
    yield (
        "tokens",
        f"{settings.seq_len} per sequence",
        f"the model as published reaches {reaches}",
    )
    if settings.target_length != settings.seq_len:
        why = "what RoPE reaches; rows are shorter, and positions beyond them are not trained"
        yield "context", f"{settings.context} tokens", f"--context: {why}"
    yield "rope", settings.rope, _rope_reason(decisions)
    yield "attention", describe_layers(decisions.model_config), _rows(decisions)


def _of_ranks(decisions: Decisions) -> Iterator[Row]:
    settings, options = decisions.settings, decisions.options
    degree, num_gpus = decisions.sequence_degree, options.num_gpus
    yield "degrees", f"ulysses {settings.ulysses} x ring {settings.ring}", decisions.sharing.why
    if not options.cpu:
        yield from _kernel_rows(decisions.model_config)
    if options.step_rows is not None:
        forwards, tokens = (
            settings.gradient_accumulation_steps,
            options.step_rows * settings.seq_len,
        )
        option = "--rows-per-step" if options.tokens_per_step is None else "--tokens-per-step"
        why = f"{num_gpus // degree} at once x {forwards} (gradient_accumulation_steps)"
        said = f"{options.step_rows}, of {tokens:,} tokens in all"
        yield "rows per step", said, f"{option}: {why}"
    if settings.stages:
        steps = ", ".join(str(of.gradient_accumulation_steps) for of in settings.of_stages())
        why = f"about as many tokens a step: gradient_accumulation_steps {steps}"
        yield "stages", "; ".join(map(str, settings.length_stages)), why
    unit = "CPU process" if options.cpu else "GPU"
    sequences = f"{degree} of {num_gpus} share a sequence; sequences at once: {num_gpus // degree}"
    yield "shards", f"{decisions.tokens_per_gpu} tokens per {unit}", sequences
    placed = "every rank has the same share of the mask"
    if settings.ring == 1:
        placed = "no ring, so every layout is the same"
    elif decisions.placement == "contiguous":
        placed = "under a window ranks have about equal work and need few keys of others"
    yield "layout", decisions.placement, placed


def _of_memory(settings: Settings) -> Iterator[Row]:
    yield "checkpoint", settings.checkpoint, POLICIES[settings.checkpoint].summary
    if (share := settings.attention_kept) < 1:
        again = f"recomputing the rest takes {(1 - share) ** 2:.0%} of attention's forward pass"
        yield "attention kept", f"of {share:.0%} of the tokens", f"--attention-kept: {again}"
    why = "--mlp-tiles: an MLP's intermediates exist for one tile at a time"
    if settings.mlp_tiles == 1:
        why = "--mlp-tiles: each MLP runs over all tokens at once"
    elif settings.mlp_tiles is None:
        why = "as few as keep a tile within 1/16 of the GPU's memory (CPU: 1)"
    yield "mlp tiles", str(settings.mlp_tiles or "auto"), why


def _recipe(decisions: Decisions) -> tuple[str, str]:
    recipe, assistant_only = decisions.task
    if recipe == "finetune":
        return "finetune", "plain text; --sft and --dpo take TRL's trainers"
    if recipe == "dpo":
        return "dpo", "TRL's DPOTrainer (--dpo): chosen answers are learned over rejected ones"
    if assistant_only:
        return "sft", "TRL's SFTTrainer: the assistant's tokens are learned (--train-on)"
    return "sft", "TRL's SFTTrainer: labels are learned, or completions, or else all tokens"


def _rows(decisions: Decisions) -> str:
    if group := decisions.settings.shifted_group:
        return f"in training, in groups of {group} tokens, shifted for half of the heads"
    if decisions.settings.pack:
        return "documents of a row don't see each other (--pack)"
    if decisions.task.recipe == "finetune":
        return "within rows of joined text; --pack keeps documents apart"
    return "within rows of one record; --pack puts several into a row, kept apart"


def _rope_reason(decisions: Decisions) -> str:
    rope = getattr(decisions.model_config, "rope_parameters", None)
    if rope is None:
        return "the model's attention sees no positions"
    if decisions.settings.rope == "none":
        kinds = [rope] if "rope_type" in rope else rope.values()
        types = dict.fromkeys(kind["rope_type"] if kind else "no positions" for kind in kinds)
        is_long_enough = reach_problem(decisions.model_config, decisions.settings.seq_len) is None
        reaches = "long enough" if is_long_enough else "too short (--allow-beyond-reach)"
        return f"as published ({' and '.join(types)}), {reaches}"
    settings, old = decisions.settings, decisions.old_config
    change = describe_change(old, decisions.model_config)
    if settings.rope == "dynamic":
        return f"frozen at this length: {change}"
    if settings.rope != "theta":
        return change
    theta, why = chosen_theta(old, settings.target_length)
    given = f"given by --rope-theta; the rule has {theta:g}, {why}"
    return f"{change}; {why if settings.rope_theta is None else given}"


def _weights(decisions: Decisions) -> tuple[str, str]:
    settings = decisions.settings
    if settings.load_in_4bit:
        return "4 bits (NF4)", "--load-in-4bit: frozen, a whole copy in each process"
    # Under FSDP2 with mixed precision, trained weights are kept in float32.
    is_narrow = settings.dtype != "float32" and (settings.uses_lora or not decisions.options.fsdp)
    dtype, width = (str(settings.dtype), 2) if is_narrow else ("float32", 4)
    whole = decisions.num_parameters * width
    if is_narrow and not decisions.options.dtype:
        dtype += ", as the model's config says (--dtype)"
    if decisions.options.states_on_host:
        states = "with gradients and AdamW's states 4 times that" if not settings.uses_lora else ""
        why = f"--states-on-host: in {dtype}, a layer at a time on the GPU; {states}".rstrip("; ")
        return f"{size_text(whole)} of hosts (FSDP2)", why
    if decisions.options.fsdp:
        share = size_text(whole / decisions.options.num_gpus)
        return f"{share} per GPU (FSDP2)", f"{size_text(whole)} over all GPUs in {dtype}"
    return f"{size_text(whole)} per process", f"a whole copy in each, in {dtype}"


def describe_layers(model_config: Any) -> str:
    """Such as `12 layers of window 128, 12 layers causal, sinks`, for a supported family."""
    facts = ModelFacts.of(model_config)
    parts = [
        f"{count} layer{'s' if count > 1 else ''} {_reach(reach)}"
        for reach, count in Counter(facts.reaches).items()
    ]
    family, recurrent = FAMILIES[model_config.model_type], facts.num_recurrent
    if recurrent:
        kinds = " and ".join(feature for feature in family.features if feature in RECURRENT)
        parts.append(f"{recurrent} layer{'s' if recurrent > 1 else ''} recurrent ({kinds})")
    if facts.softcap:
        parts.append(f"softcap {facts.softcap:g}")
    if SINKS in family.features:
        parts.append("sinks")
    return ", ".join(parts)


def _reach(reach: Reach) -> str:
    if reach.chunk:
        return f"of chunks of {reach.chunk}"
    return f"of window {reach.window}" if reach.window else "causal"


def _kernel_rows(model_config: Any) -> list[Row]:
    """(what, value, why) for a run on GPUs; empty where no layer is recurrent."""
    packages = kernel_packages(model_config)
    if not packages:
        return []
    words = " ".join(TO_INSTALL.get(name, name) for name in packages)
    why = (
        f"a GPU's run is refused without them: pip install {words}, or add "
        "--torch-recurrence to the launch command for torch's slow functions"
    )
    return [("recurrent kernels", ", ".join(packages), why)]


def _prediction_rows(decisions: Decisions) -> list[Row]:
    """Returns what is predicted, or why it is not although it was asked for."""
    result = decisions.sharing.predicted
    if result is None:
        why = why_unpredicted(decisions.model_config, is_dpo=decisions.task.recipe == "dpo")
        why += " is not predicted; the rehearsal before the first step measures"
        return [("memory", "not predicted", why)] if decisions.names_gpus else []
    memory, cluster = result.memory.total / 2**30, result.job.cluster
    checked = "" if cluster.host_bytes else " (not checked: --host-gib)"
    host = f", {result.host_bytes / 2**30:.0f} GiB of a host" if result.host_bytes else ""
    host += checked if host else ""
    usable = f"predicted for {cluster}, of {usable_bytes(result.job) / 2**30:.0f} that it may be"
    note = f"; {cluster.hardware.note}" if cluster.hardware.note else ""
    speed = f"{result.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, {result.mfu:.0%} MFU"
    speed += (
        "" if _is_causal(decisions) else "; a step takes less: attention is counted as plain causal"
    )
    return [
        ("memory", f"{memory:.0f} GiB of a GPU{host}", usable),
        ("step", f"{result.time.total:.3g} s", f"predicted: {speed}{note}"),
    ]


def _is_causal(decisions: Decisions) -> bool:
    """Says whether each token sees all before it, which is what the planner counts."""
    settings = decisions.settings
    reaches = ModelFacts.of(decisions.model_config).reaches_in(settings.seq_len)
    is_local = any(reach.is_local for reach in reaches)
    return not (settings.pack or settings.shifted_group or is_local)
