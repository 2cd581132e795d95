"""Rows of more tokens than kernels of recurrent layers can count: cut up by chains, which take the
place of transformers' own forward on one rank, and refused on the stock path."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch import LongContextConfig, patch
from longctx_patch.engine.chain import convolution
from longctx_patch.hf.call import mixer_kernels
from longctx_patch.hf.call.mixer_kernels import Countable, countable
from longctx_patch.hf.model.transformers_api import recurrent_modules
from tests.hf.by_documents import stock_step, whole_row
from tests.hf.call.test_mixers import (
    CHAINED,
    LENGTH,
    THOROUGH,
    TOLERANCE,
    Function,
    assert_exact,
    install_kernels,
)
from tests.hf.float64 import in_float64
from tests.hf.tiny import featured_model
from tests.reference import relative_error

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
    """Of a width that divides neither limit."""
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
