"""What the refusal of DeepSeek sparse attention says is what a run past it gives."""

import pytest
from sparse_attention import FAMILIES, measure

from longctx_patch import LongContextConfig, UnsupportedModelError
from longctx_patch.hf.model.checks import check_model_config
from tests.hf.tiny import tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_past_the_refusal_is_as_wrong_as_it_says(family: str) -> None:
    config = tiny_config(family, num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError) as refusal:
        check_model_config(config, LongContextConfig(ring_degree=2))
    said = str(refusal.value)
    assert "misses more than half of the picks" in said
    assert "loss is more than 1 % off and gradients more than 100 %" in said
    found = measure(family)
    assert found.picks > 0.5
    assert found.loss > 0.01
    assert found.gradients > 1
