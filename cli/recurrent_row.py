"""What the table of a run folder says of recurrent layers: what their ranks exchange, and which
packages a GPU needs for them."""

from typing import Any

from longctx_patch.choose.recurrence import both_ways, decide_recurrence, recompute_of
from longctx_patch.config import LongContextConfig
from longctx_patch.families.recurrent_layers import kernel_packages, recurrent_layers
from longctx_patch.hf.call.kernel_faults import TRUSTS_MENDED
from longctx_patch.plans.recurrent import states_because
from longctx_patch.predict.machines import MACHINES
from longctx_patch.sequence.documents import Documents

TO_INSTALL = {
    "flash-linear-attention": f"'flash-linear-attention>={TRUSTS_MENDED}' tilelang",
}
"""What pip is given for a package: without tilelang, gated delta rules are refused on Hopper GPUs
with the Triton of torch 2.11."""


def recurrent_rows(
    model_config: Any, config: LongContextConfig, num_tokens: int
) -> list[tuple[str, str, str]]:
    """(what, value, why) for a row of one document; empty where nothing is to be decided."""
    layers = recurrent_layers(model_config)
    if layers is None or layers.recurrence is None or config.sequence_degree == 1:
        return []
    shape, row = layers.recurrence, Documents.one(num_tokens)
    value = {
        "states": f"states, along {config.sequence_degree} ranks",
        "heads": f"heads, among {config.ulysses_degree} ranks",
    }[decide_recurrence(config, shape, row)]
    why = states_because(shape.num_heads, shape.num_groups, config.ulysses_degree)
    if why is None:
        states, heads = (
            1e3 * way.seconds(recompute_of(config)) for way in both_ways(config, shape, row)
        )
        source = MACHINES[config.hardware].recurrent.source(shape.kind)
        why = (
            f"a layer predicted, from rates {source}: states {states:.3g} ms, heads {heads:.3g}; "
            "for packed rows decided row by row"
        )
    return [("recurrent", f"exchange {value}", why)]


def kernel_rows(model_config: Any) -> list[tuple[str, str, str]]:
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
