"""What a run folder's README says of CPU memory and the model's weights."""

from pathlib import Path

from longctx_patch.cli.decisions import Decisions
from longctx_patch.cli.text_table import size_text
from longctx_patch.recipes.models import is_bare_config

QUANTISED = """\
While loading, every process reads the whole model and quantises it on its GPU, weight by weight."""
OWN_ROWS = """\
While loading, each process reads its own rows of the weights from safetensors{place}."""
HUB = """\
A model on the hub without safetensors is read whole by every process: {size} of CPU memory each."""
DRAWN = """\
While loading, process 0 draws the random weights on its GPU, a layer at a time, and shares each
out."""
DRAWN_FOR_ADAPTER = """\
While loading, process 0 draws the random weights and holds them in CPU memory: {size}."""

REFERENCE = "DPO's reference, a second model, is read and sharded in the same way."


def loading_section(decisions: Decisions) -> str:
    """Who reads the weights, and what CPU memory holds of them."""
    settings, options = decisions.settings, decisions.options
    size = size_text(decisions.num_parameters * (4 if settings.dtype == "float32" else 2))
    whole = f"every process holds the whole model in {settings.dtype} in CPU memory: {size}."
    if options.cpu:
        return f"While it runs, {whole}"
    if settings.load_in_4bit:
        return QUANTISED
    lines = [_own_rows(decisions, whole, size)]
    if decisions.task.recipe == "dpo" and not settings.uses_lora:
        lines.append(REFERENCE)
    return " ".join(lines)


def _own_rows(decisions: Decisions, whole: str, size: str) -> str:
    model, options = decisions.settings.model, decisions.options
    if is_bare_config(model):
        return DRAWN_FOR_ADAPTER.format(size=size) if decisions.settings.uses_lora else DRAWN
    why = _why_whole(decisions)
    if why:
        return f"While loading, {whole[:-1]}, since {why}."
    kept = " into CPU memory, where they stay" if options.states_on_host else " onto its GPU"
    text = OWN_ROWS.format(place=kept)
    return text if Path(model).is_dir() else f"{text} {HUB.format(size=size)}"


def _why_whole(decisions: Decisions) -> str:
    """Why weights can't be read by rows, as far as the config and a local folder show it."""
    folder = Path(decisions.settings.model).expanduser()
    if getattr(decisions.model_config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return "it has no weights in safetensors (`save_pretrained` writes them)"
    return ""
