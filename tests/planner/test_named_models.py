"""Sizes of named models, and the GPUs on which some were measured."""

import math

import pytest

import tests.benchmarks  # puts the scripts' folder on the path  # noqa: F401  # isort: skip
from model_shapes import MODELS

from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.named_models import NAMED, NamedModel
from tests.planner.measured import AFTERWARDS, IN_VIEW

PUBLISHED = {
    **{"Llama-3.1-8B": 8030, "Llama-3.1-70B": 70554, "Qwen3-0.6B": 596, "Qwen3-1.7B": 1721},
    **{"Qwen3-4B": 4022, "Qwen3-8B": 8191, "Qwen3-14B": 14768, "Qwen3-32B": 32762},
    **{"Qwen3.5-9B": 8954, "Mistral-7B-v0.3": 7248, "Mistral-Small-24B-Base-2501": 23572},
    **{"gemma-3-4b-pt": 3880, "gemma-3-12b-pt": 11766, "gemma-3-27b-pt": 27009},
    **{"SmolLM2-135M": 135, "SmolLM2-1.7B": 1711, "SmolLM3-3B": 3075},
}
"""Millions of weights of the text model, tied embeddings counted once."""


@pytest.mark.parametrize("model", [m for m in NAMED.values() if m.name in PUBLISHED])
def test_models_have_as_many_weights_as_published(model: NamedModel) -> None:
    shape = shape_of(model.config(), model.name)
    assert math.isclose(shape.num_weights / 1e6, PUBLISHED[model.name], abs_tol=0.5)


def test_measured_models_are_those_of_measured_runs() -> None:
    runs = [(MODELS[run.run.partition(":")[0]], run.gpu.lower()) for run in [*AFTERWARDS, *IN_VIEW]]
    for model in NAMED.values():
        kinds = {gpu for sizes, gpu in runs if sizes == model.sizes}
        assert kinds == set(model.measured_on), model.name
