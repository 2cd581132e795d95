"""The table of a run folder: what was decided, and why."""

from collections import Counter
from typing import Any

from longctx_patch.cli.decisions import Decisions
from longctx_patch.cli.prediction import why_unpredicted
from longctx_patch.cli.text_table import size_text
from longctx_patch.families.facts import ModelFacts, Reach
from longctx_patch.families.family import RECURRENT, SINKS
from longctx_patch.families.recurrent_layers import kernel_packages
from longctx_patch.families.rope import chosen_theta
from longctx_patch.families.rope_facts import describe_change, reach_problem, reachable_length
from longctx_patch.families.supported import FAMILIES
from longctx_patch.hf.call.kernel_faults import TRUSTS_MENDED
from longctx_patch.memory.policies import POLICIES
from longctx_patch.planner.search import Result, usable_bytes
from longctx_patch.recipes import models
from longctx_patch.recipes.mixture import read_mixture
from longctx_patch.recipes.settings import Settings

TO_INSTALL = {
    "flash-linear-attention": f"'flash-linear-attention>={TRUSTS_MENDED}' tilelang",
}
"""What pip is given for a package: without tilelang, gated delta rules are refused on Hopper GPUs
with the Triton of torch 2.11."""


def table(decisions: Decisions) -> list[tuple[str, str, str]]:
    """(what, value, why) of every decision."""
    settings = decisions.settings
    reach = reachable_length(decisions.old_config)
    reaches = "any length" if reach is None else f"{reach}"
    unit = "CPU process" if decisions.options.cpu else "GPU"
    random = " (random weights: a bare config)" if models.is_bare_config(settings.model) else ""
    placed = "every rank has the same share of the mask"
    if decisions.placement == "contiguous":
        placed = "under a window ranks have about equal work and need few keys of others"
    facts = ModelFacts.of(decisions.model_config)
    degree, num_gpus = decisions.sequence_degree, decisions.options.num_gpus
    sequences = f"{degree} of {num_gpus} share a sequence; sequences at once: {num_gpus // degree}"
    return [
        ("model", settings.model, f"{decisions.num_parameters:,} parameters{random}"),
        *_images(settings.model),
        ("data", ", ".join(settings.text), "--data" if decisions.has_text else "to be given"),
        *_mixture(decisions),
        *_evaluation(decisions),
        ("recipe", *_recipe(decisions)),
        (
            "trained",
            ", ".join(
                ["LoRA adapter" if settings.uses_lora else "every weight", *settings.also_train]
            ),
            "--lora or --full",
        ),
        ("tokens", f"{settings.seq_len} per sequence", f"the model as published reaches {reaches}"),
        *_context(settings),
        ("rope", settings.rope, _rope_reason(decisions)),
        ("attention", describe_layers(decisions.model_config), _rows(decisions)),
        ("degrees", f"ulysses {settings.ulysses} x ring {settings.ring}", decisions.sharing.why),
        *([] if decisions.options.cpu else _kernel_rows(decisions.model_config)),
        *_rows_per_step(decisions),
        *_stages(decisions.settings),
        ("shards", f"{decisions.tokens_per_gpu} tokens per {unit}", sequences),
        (
            "layout",
            decisions.placement,
            placed if settings.ring > 1 else "no ring, so every layout is the same",
        ),
        ("checkpoint", settings.checkpoint, POLICIES[settings.checkpoint].summary),
        *_attention_kept(settings.attention_kept),
        ("mlp tiles", *_mlp_tiles(settings.mlp_tiles)),
        ("weights", *_weights(decisions)),
        *_prediction_rows(
            decisions.sharing.predicted,
            why_not=_why_unpredicted(decisions),
            is_causal=not (
                settings.pack
                or settings.shifted_group
                or any(reach.is_local for reach in facts.reaches_in(settings.seq_len))
            ),
        ),
    ]


def _context(settings: Settings) -> list[tuple[str, str, str]]:
    if settings.target_length == settings.seq_len:
        return []
    why = (
        "--context: what RoPE reaches; rows are shorter, and positions beyond them are not trained"
    )
    return [("context", f"{settings.context} tokens", why)]


def _images(model: str) -> list[tuple[str, str, str]]:
    whole = models.whole_config(model)
    if whole is None:
        return []
    why = f"{whole.model_type} reads them: its text model is trained, and is what final/ holds"
    return [("images", "left out", f"{why} (docs/how-to/images.md puts it back)")]


def _why_unpredicted(decisions: Decisions) -> str:
    if not decisions.names_gpus:
        return ""
    return why_unpredicted(decisions.model_config, is_dpo=decisions.task.recipe == "dpo")


def _rows_per_step(decisions: Decisions) -> list[tuple[str, str, str]]:
    options, settings = decisions.options, decisions.settings
    if options.step_rows is None:
        return []
    forwards = settings.gradient_accumulation_steps
    at_once = options.num_gpus // decisions.sequence_degree
    tokens = options.step_rows * settings.seq_len
    option = "--rows-per-step" if options.tokens_per_step is None else "--tokens-per-step"
    why = f"{option}: {at_once} at once x {forwards} (gradient_accumulation_steps)"
    return [("rows per step", f"{options.step_rows}, of {tokens:,} tokens in all", why)]


def _stages(settings: Settings) -> list[tuple[str, str, str]]:
    if not settings.stages:
        return []
    said = "; ".join(map(str, settings.length_stages))
    forwards = ", ".join(str(of.gradient_accumulation_steps) for of in settings.of_stages())
    why = f"about as many tokens a step: gradient_accumulation_steps {forwards}"
    return [("stages", said, why)]


def _attention_kept(share: float) -> list[tuple[str, str, str]]:
    if share == 1:
        return []
    again = f"recomputing the rest takes {(1 - share) ** 2:.0%} of attention's forward pass"
    return [("attention kept", f"of {share:.0%} of the tokens", f"--attention-kept: {again}")]


def _mlp_tiles(tiles: int | None) -> tuple[str, str]:
    if tiles is None:
        return "auto", "as few as keep a tile within 1/16 of the GPU's memory (CPU: 1)"
    if tiles == 1:
        return "1", "--mlp-tiles: each MLP runs over all tokens at once"
    return str(tiles), "--mlp-tiles: an MLP's intermediates exist for one tile at a time"


def _recipe(decisions: Decisions) -> tuple[str, str]:
    recipe, assistant_only = decisions.task
    if recipe == "finetune":
        return "finetune", "plain text; --sft and --dpo take TRL's trainers"
    if recipe == "dpo":
        return "dpo", "TRL's DPOTrainer (--dpo): chosen answers are learned over rejected ones"
    if assistant_only:
        return "sft", "TRL's SFTTrainer: the assistant's tokens are learned (--train-on)"
    return "sft", "TRL's SFTTrainer: labels are learned, or completions, or else all tokens"


def _mixture(decisions: Decisions) -> list[tuple[str, str, str]]:
    settings = decisions.settings
    if not settings.mixture:
        return []
    found = read_mixture(settings.mixture)
    why = f"of the tokens; long from {found.least_of(settings.seq_len):,}"
    shares = f"long {found.long:.0%}, short {found.short:.0%}"
    return [("mixture", shares, f"{why} ({found.source or '--mixture'})")]


def _evaluation(decisions: Decisions) -> list[tuple[str, str, str]]:
    found = decisions.options.eval_sources
    return [("evaluation", ", ".join(found), "--eval-data")] if found else []


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


def _kernel_rows(model_config: Any) -> list[tuple[str, str, str]]:
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


def _prediction_rows(
    result: Result | None, *, why_not: str, is_causal: bool
) -> list[tuple[str, str, str]]:
    """(what, value, why) of a run folder's table.

    Args:
        why_not: what is not predicted although it was asked for; else empty.
        is_causal: each token sees all before it, which is what the planner counts.
    """
    if result is None:
        why = f"{why_not} is not predicted; the rehearsal before the first step measures"
        return [("memory", "not predicted", why)] if why_not else []
    memory, cluster = result.memory.total / 2**30, result.job.cluster
    checked = "" if cluster.host_bytes else " (not checked: --host-gib)"
    host = f", {result.host_bytes / 2**30:.0f} GiB of a host" if result.host_bytes else ""
    host += checked if host else ""
    usable = f"predicted for {cluster}, of {usable_bytes(result.job) / 2**30:.0f} that it may be"
    speed = f"{result.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, {result.mfu:.0%} MFU"
    speed += "" if is_causal else "; a step takes less: attention is counted as plain causal"
    return [
        ("memory", f"{memory:.0f} GiB of a GPU{host}", usable),
        ("step", f"{result.time.total:.3g} s", f"predicted: {speed}"),
    ]
