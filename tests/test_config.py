from functools import partial
from typing import Any

import pytest

from longctx_patch import LongContextConfig, LongContextTrainer, make_accelerator, patch
from tests.hf.tiny import tiny_model


def test_degree_is_the_product() -> None:
    assert LongContextConfig(ulysses_degree=2, ring_degree=3).sequence_degree == 6


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "0.*whole number.*ring_degree=1 to"),
        (-1, "-1.*whole number.*ring_degree=1 to"),
        (1.5, "1.5.*whole number.*ring_degree=1 to"),
        (True, "True.*whole number.*ring_degree=1 to"),
        ("two", "'two', of type str.*whole number.*ring_degree=1 to"),
        ("2", r"'2', of type str.*whole number.*Use ring_degree=2\.$"),
    ],
)
def test_degrees_are_whole_numbers(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=rf"ring_degree={says}"):
        LongContextConfig(ring_degree=value)  # type: ignore[arg-type]


def test_settings_are_no_config() -> None:
    said = r"config is a dict, not a LongContextConfig: give LongContextConfig\(\*\*settings\)"
    settings: Any = {"ring_degree": 2}
    for take in (partial(patch, tiny_model()), make_accelerator):
        with pytest.raises(TypeError, match=said):
            take(settings)
    with pytest.raises(TypeError, match="long_context is a NoneType, not a LongContextConfig"):
        LongContextTrainer(tiny_model(), long_context=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 2.0, True])
def test_counts_are_whole_numbers_or_none(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"mlp_tiles={value}.*it counts .*Use mlp_tiles=1"):
        LongContextConfig(mlp_tiles=value)
    assert LongContextConfig(mlp_tiles=None).mlp_tiles is None


def test_a_setting_that_went_is_refused_with_the_reason() -> None:
    settings: dict[str, Any] = {"ring_degree": 2, "ulysses_waves": 2}
    with pytest.raises(ValueError, match=r"ulysses_waves is no setting any more\. .* Leave it out"):
        LongContextConfig(**settings)


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("layout", "zig-zag", "zigzag"),
        ("plan", "zigzagdirect", "zigzag_direct"),
        ("backward_plan", "brst", "burst"),
        ("checkpoint", "attn", "attention"),
        ("hardware", "H200", "h200"),
        ("loss", "chunk", "chunked"),
    ],
)
def test_choices_are_listed_and_the_nearest_is_named(name: str, value: str, nearest: str) -> None:
    expected = f"{name}={value!r}: choose one of .*{nearest}.* Did you mean {nearest!r}"
    with pytest.raises(ValueError, match=expected):
        LongContextConfig(**{name: value})  # type: ignore[arg-type]


def test_a_plan_wants_its_layout() -> None:
    with pytest.raises(ValueError, match=r"plan='ring' with layout='zigzag'.*layout='contiguous'"):
        LongContextConfig(plan="ring", layout="zigzag")
    assert LongContextConfig(plan="ring").placement == "contiguous"
    assert LongContextConfig().placement == "zigzag"


def test_forward_and_backward_are_chosen_apart_over_one_layout() -> None:
    config = LongContextConfig(plan="zigzag_direct", backward_plan="burst")
    assert config.placement == "zigzag"
    with pytest.raises(ValueError, match=r"backward_plan='distflash' with layout='zigzag'"):
        LongContextConfig(backward_plan="distflash")


@pytest.mark.parametrize(
    ("plan", "size", "ring"),
    [
        ("double_ring", None, 4),
        ("double_ring", 3, 4),
        ("double_ring", 2.0, 4),
        ("double_ring", "2", 4),
        ("zigzag", 2, 4),
    ],
)
def test_the_double_ring_needs_full_machines(plan: Any, size: Any, ring: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks_per_node={size} .*divide ring_degree"):
        LongContextConfig(plan=plan, ranks_per_node=size, ring_degree=ring)
    assert LongContextConfig(plan="double_ring", ranks_per_node=2, ring_degree=4)
