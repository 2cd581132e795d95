"""What the run folder says of recurrent layers: their exchange, and the packages that they need."""

import pytest

from longctx_patch import LongContextConfig
from longctx_patch.cli.decision_table import _kernel_rows, _recurrent_rows
from longctx_patch.families.recurrent_layers import kernel_packages
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of
from tests.hf.call.test_mixers import CHAINED
from tests.hf.tiny import featured_model


def test_the_way_is_named_with_its_reason() -> None:
    config = featured_model("bamba").config  # of eight heads
    by_rule = _recurrent_rows(config, LongContextConfig(ulysses_degree=3), 4096)
    assert by_rule == [
        (
            "recurrent",
            "exchange states, along 3 ranks",
            "8 heads with a state are no multiple of ulysses_degree=3",
        )
    ]
    ((what, value, why),) = _recurrent_rows(config, LongContextConfig(ulysses_degree=2), 4096)
    assert (what, value.split(",")[0]) in {
        ("recurrent", "exchange states"),
        ("recurrent", "exchange heads"),
    }
    assert why.startswith("a layer predicted, from rates estimated: states ")


def test_nothing_is_said_where_nothing_is_decided() -> None:
    assert _recurrent_rows(featured_model("bamba").config, LongContextConfig(), 4096) == []
    shared = LongContextConfig(ulysses_degree=2)
    assert _recurrent_rows(featured_model("lfm2").config, shared, 4096) == []
    assert _recurrent_rows(featured_model("llama").config, shared, 4096) == []


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
