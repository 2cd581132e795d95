"""What the run folder says of recurrent layers: the packages that they need."""

import pytest

from longctx_patch.cli.decision_table import _kernel_rows
from longctx_patch.families.recurrent_layers import kernel_packages
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of
from tests.hf.call.test_mixers import CHAINED
from tests.hf.tiny import featured_model


@pytest.mark.parametrize("family", CHAINED)
def test_the_packages_are_those_whose_kernels_the_layers_call(family: str) -> None:
    model = featured_model(family)
    called = {
        KERNELS[name].distribution
        for mixer in transformers_api.recurrent_modules(model)
        for name in functions_of(mixer)
    }
    assert set(kernel_packages(model.config)) == called
    ((what, value, why),) = _kernel_rows(model.config)
    assert (what, value) == ("recurrent kernels", ", ".join(sorted(called)))
    words = " ".join(sorted(called)).replace(
        "flash-linear-attention", "'flash-linear-attention>=0.6' tilelang"
    )
    assert f"pip install {words}, or add --torch-recurrence" in why


def test_attention_needs_no_packages_of_recurrent_layers() -> None:
    assert _kernel_rows(featured_model("llama").config) == []
