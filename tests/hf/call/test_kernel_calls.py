"""Kernels of recurrent layers: a convolution's is given the tokens before a shard as a state where
it takes one, and rows that one can't count are cut up, or refused on the stock path."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, patch
from longctx_patch.engine.chain import convolution
from longctx_patch.engine.chain.convolution import in_a_row
from longctx_patch.hf.call import mixer_kernels
from longctx_patch.hf.call.mixer_kernels import Countable, countable
from longctx_patch.hf.model.transformers_api import recurrent_modules
from tests.hf.call.test_mixers import (
    CHAINED,
    LENGTH,
    THOROUGH,
    TOLERANCE,
    Function,
    assert_exact,
    install_kernels,
)
from tests.hf.float64 import in_float64, stock_step, whole_row
from tests.hf.tiny import featured_model
from tests.reference import relative_error

FAMILIES = [name for name in ("qwen3_5_text", "falcon_h1", "nemotron_h") if name in CHAINED]


def kernel_over(stock: Function, calls: list[bool]) -> Function:
    """As causal-conv1d's, which takes a state of tokens whose channels lie side by side alone. It
    notes whether each call had one."""

    def kernel(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        calls.append(initial_states is not None)
        if initial_states is None:
            return stock(x, weight, bias, activation=activation)
        reach = weight.shape[1] - 1
        assert initial_states.shape == (*x.shape[:2], reach)
        assert x.stride(1) == initial_states.stride(1) == 1
        assert x.shape[2] > reach
        joined = torch.cat([initial_states, x], dim=2)
        return stock(joined, weight, bias, activation=activation)[:, :, reach:]

    return kernel


def calls_of(
    family: str, config: LongContextConfig, lengths: tuple[int, ...], patched: pytest.MonkeyPatch
) -> list[bool]:
    """Returns those of all layers and ranks of an exact step."""
    model, calls = in_float64(family), list[bool]()
    wanted = stock_step(copy.deepcopy(model), lengths)

    def made(name: str, stock: Function) -> Function | None:
        return kernel_over(stock, calls) if name == "causal_conv1d_fn" else None

    install_kernels(model, made, patched)
    assert_exact(model, config, lengths, wanted)
    assert len(calls) == len(recurrent_modules(model)) * config.ring_degree
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_contiguous_shards_hand_over_a_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongContextConfig(ring_degree=3, layout="contiguous")
    calls = calls_of(family, config, (LENGTH,), monkeypatch)
    assert sum(calls) == len(calls) * 2 // 3  # all ranks but the first


def test_a_shard_of_few_tokens_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns those for which a kernel would need the state and the tokens together."""
    config = LongContextConfig(ring_degree=3, layout="contiguous")
    assert not any(calls_of(FAMILIES[0], config, (8,), monkeypatch))


def test_several_segments_are_convolved_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongContextConfig(ring_degree=3, layout="zigzag")
    calls = calls_of(FAMILIES[0], config, (LENGTH,), monkeypatch)
    assert sum(calls) == len(calls) // 3  # the two segments of the last rank are one


def test_channels_lie_side_by_side() -> None:
    made = torch.randn(2, 5, 3).transpose(1, 2)
    assert in_a_row([made]).data_ptr() == made.data_ptr()
    joined = in_a_row([made, torch.randn(2, 3, 4)])
    assert joined.shape == (2, 3, 9)
    assert joined.stride(1) == 1


PACKAGES = {"causal_conv1d_fn": "causal-conv1d", "mamba2_chunk_scan": "mamba-ssm"}


def notice(model: Any, seen: dict[str, list[int]], patched: pytest.MonkeyPatch) -> None:
    """Transformers' own functions as kernels note from how far apart tokens are read."""

    def made(name: str, stock: Function) -> Function:
        return noting(stock, seen.setdefault(name, []))

    install_kernels(model, made, patched)


def noting(stock: Function, seen: list[int]) -> Function:
    def kernel(*args: Any, **options: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim > 2]
        is_convolution = len(given) == 1
        seen.extend(x.stride(2 if is_convolution else 1) for x in given)
        return stock(*args, **options)

    return kernel


@pytest.mark.parametrize("family", CHAINED)
def test_tokens_are_as_far_apart_as_is_said(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width divides neither limit."""
    model, seen = featured_model(family), dict[str, list[int]]()
    assert countable(recurrent_modules(model)) is None  # torch counts right
    notice(model, seen, monkeypatch)
    model(**whole_row((LENGTH,)))
    limits = {
        (limit + 1) // max(seen[name]): PACKAGES[name]
        for name, limit in (("causal_conv1d_fn", 2**32 - 1), ("mamba2_chunk_scan", 2**31 - 1))
        if name in seen
    }
    tokens = min(limits)
    assert countable(recurrent_modules(model)) == Countable(tokens, limits[tokens])


@pytest.mark.parametrize(
    ("chunk", "held"),
    [(2, lambda mixer: mixer.intermediate_size * mixer.ssm_state_size // 2), (512, None)],
)
def test_what_a_scan_holds_counts_too(
    chunk: int, held: Callable[[Any], int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of short chunks, or the products of long ones, are wider than the projection."""
    model = featured_model("bamba", mamba_chunk_size=chunk)
    notice(model, {}, monkeypatch)
    mixer: Any = recurrent_modules(model)[0]
    width = held(mixer) if held else mixer.n_groups * chunk
    assert width > mixer.in_proj.out_features
    assert countable([mixer]) == Countable(2**31 // width, "mamba-ssm")


@pytest.mark.parametrize("ring_degree", [1, 2])
@pytest.mark.parametrize("family", THOROUGH)
def test_what_kernels_can_t_count_is_cut_up(
    family: str, ring_degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = in_float64(family), dict[str, list[int]]()
    wanted = stock_step(copy.deepcopy(model), (LENGTH,))
    notice(model, seen, monkeypatch)
    config = LongContextConfig(ring_degree=ring_degree, layout="contiguous")
    assert_exact(model, config, (LENGTH,), wanted)
    of_convolutions = seen["causal_conv1d_fn"]
    calls = len(of_convolutions)
    count_less(monkeypatch, 10 * max(of_convolutions))
    of_convolutions.clear()
    assert_exact(model, config, (LENGTH,), wanted)
    assert len(of_convolutions) >= 2 * calls


def count_less(patched: pytest.MonkeyPatch, places: int) -> None:
    for module in (mixer_kernels, convolution):
        patched.setattr(module, "MOST_UNSIGNED_PLACES", places - 1)


@pytest.mark.parametrize("family", THOROUGH)
def test_the_stock_path_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = in_float64(family), dict[str, list[int]]()
    wanted = copy.deepcopy(model).eval()(**whole_row((LENGTH,))).loss
    notice(model, seen, monkeypatch)
    model(**whole_row((20,)))
    count_less(monkeypatch, 20 * max(seen["causal_conv1d_fn"]))
    handle = patch(model.eval(), LongContextConfig())
    model(**whole_row((20,)))
    said = (
        rf"{LENGTH} tokens in one call of .* of causal-conv1d compute wrong .* beyond 20\. In eval"
    )
    with pytest.raises(ValueError, match=said):
        model(**whole_row((LENGTH,)))
    with pytest.raises(ValueError, match=said):
        model.generate(whole_row((LENGTH,))["input_ids"], max_new_tokens=2)
    with torch.no_grad(), handle.sharing_evaluation():
        assert relative_error(model(**whole_row((LENGTH,))).loss, wanted) < TOLERANCE
