"""Shifted sparse attention over ranks, heads and documents, against a dense table of who sees whom
that is written down from its definition (LongLoRA, section 3.2, without wrapping around)."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from longctx_patch import LongContextConfig, UnsupportedModelError, masks, patch
from longctx_patch.engine.decided import row_mask
from longctx_patch.families.checks import check_model_config
from longctx_patch.hf.handle import PatchHandle
from longctx_patch.sequence.documents import Documents
from longctx_patch.verification.shrink import keep_float64
from tests.hf import float64
from tests.hf.float64 import backward, packed_row, padded_rows, stock_loss
from tests.hf.steps import Step, complaints, step_of_ranks
from tests.hf.tiny import featured_model, tiny_model
from tests.reference import relative_error

GROUP = 6
LENGTHS = (3, 19, 15)
DENSE = "dense_shifted_groups"


def table(lengths: tuple[int, ...], num_heads: int, num_shifted: int, window: int | None) -> Tensor:
    """`[H, L, L]`: which keys a query sees, token by token; a layer with a window keeps it."""
    place = torch.cat([torch.arange(length) for length in lengths])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = place[:, None] - place
    seen = (document[:, None] == document) & (back >= 0)
    heads = []
    for head in range(num_heads):
        shift = GROUP // 2 if head >= num_heads - num_shifted else 0
        group = (place + shift) // GROUP
        heads.append(seen & (back < window if window else group[:, None] == group))
    return torch.stack(heads)


@pytest.fixture
def dense() -> Iterator[None]:
    """An attention function of transformers that computes with such a table."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
        lengths, num_shifted = module.config.dense_groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        window = getattr(module, "sliding_window", None)
        seen = table(lengths, q.shape[1], num_shifted, window)
        scores = (q @ k.transpose(2, 3)) * options["scaling"]
        scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register(DENSE, attend)
    yield
    AttentionInterface._global_mapping.pop(DENSE, None)


def model_of(family: str, heads: tuple[int, int]) -> Any:
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    model = featured_model(family, hidden_size=16 * heads[0], **sizes)
    model.set_attn_implementation("eager")
    keep_float64(model)
    return model


def dense_step(
    model: Any, batch: dict[str, Tensor], lengths: tuple[int, ...], num_shifted: int
) -> Step:
    model = copy.deepcopy(model)
    model.set_attn_implementation(DENSE)
    model.config.dense_groups = (lengths, num_shifted)
    found = backward(stock_loss(model, batch), model)
    return Step(found.pop("loss"), found)


WAYS = [{}, *float64.WAYS[:2], {"ulysses_degree": 2}, float64.WAYS[-1]]


@pytest.mark.parametrize(
    ("family", "heads", "shifted", "packed"),
    [
        ("llama", (4, 4), 2, False),
        ("llama", (8, 4), 4, True),
        ("llama", (6, 3), 2, False),  # two key-value heads are unshifted, one is: SmolLM2's
        ("llama", (6, 3), 2, True),
        ("llama", (5, 1), 3, False),
        ("gemma3_text", (4, 2), 2, True),  # layers with a window, which keep it
    ],
)
@pytest.mark.usefixtures("dense")
def test_loss_and_gradients(
    family: str, heads: tuple[int, int], shifted: int, packed: bool
) -> None:
    model = model_of(family, heads)
    batch, lengths = (packed_row(), LENGTHS) if packed else (padded_rows(), (37,))
    wanted = dense_step(model, batch, lengths, shifted)
    for way in WAYS:
        found = step_of_ranks(model, LongContextConfig(**way, shifted_group=GROUP), batch)
        assert not complaints(found, wanted, way, bound=1e-10)


@pytest.mark.usefixtures("dense")
def test_sinks_go_with_their_heads_and_evaluation_attends_fully() -> None:
    """gpt-oss, whose windows are as long as the row here; and one process equals two."""
    model = featured_model("gpt_oss", sliding_window=64, layer_types=["full_attention"] * 2)
    keep_float64(model)
    config = LongContextConfig(shifted_group=GROUP)
    one = step_of_ranks(model, config, padded_rows())
    two = step_of_ranks(model, replace(config, ring_degree=2), padded_rows())
    assert not complaints(two, one, "two ranks", bound=1e-10)
    stock = copy.deepcopy(model).eval()
    with torch.no_grad():
        wanted = stock(**padded_rows()).loss
        handle = patch(model, config)
        model.eval()
        with handle.sharing_evaluation():
            assert relative_error(model(**padded_rows()).loss, wanted) < 1e-6
        assert relative_error(one.loss, wanted) > 1e-3
    handle.unpatch()


def test_only_what_groups_see_is_computed_and_sent() -> None:
    """In four groups of the row over four ranks, contiguously placed: unshifted heads need no key
    of another rank, shifted ones half a group of one."""
    length, size = 64, 16
    batch = {"input_ids": torch.arange(length)[None] % 97}
    batch["labels"] = batch["input_ids"]
    seen: dict[str, Any] = {}

    def note(handle: PatchHandle) -> None:
        seen["sent"] = handle.first_step.planned_forward().bytes  # type: ignore[union-attr]
        seen["kinds"] = handle._calls.seen

    config = LongContextConfig(ring_degree=4, layout="contiguous", shifted_group=size)
    step_of_ranks(tiny_model(), config, batch, note)
    documents = Documents.one(length)
    areas = {row_mask(None, documents, None, k.chunk, k.first_chunk).area for k in seen["kinds"]}
    whole, half = size * (size + 1) // 2, size // 2 * (size // 2 + 1) // 2
    assert areas == {4 * whole, 3 * whole + 2 * half}
    layers, kv_heads, head_dim, width = 2, 1, 16, 4
    assert seen["sent"] <= layers * 2 * (size // 2) * kv_heads * head_dim * width


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "odd": ("llama", {"shifted_group": 5}, r"shifted_group=5: .*even number"),
    "bool": ("llama", {"shifted_group": True}, r"shifted_group=True"),
    "ulysses": ("llama", {"shifted_group": 4, "ulysses_degree": 4}, r"half of its 4 .* has 2"),
    "recurrent": ("qwen3_5_text", {"shifted_group": 4}, r"shifted_group=4 with .*Leave it out"),
    "latent": ("deepseek_v3", {"shifted_group": 4}, r"with latent attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_defined_is_refused(case: str) -> None:
    family, options, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        check_model_config(featured_model(family).config, LongContextConfig(**options))


def test_a_mask_and_windows_alone_are_refused() -> None:
    config = LongContextConfig(shifted_group=4)
    with pytest.raises(ValueError, match=r"shifted_group=4 with mask="):
        patch(tiny_model(), config, mask=masks.causal)
    windows = tiny_model("mistral", sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="no layer has full attention"):
        patch(windows, config)
    model = tiny_model()
    handle = patch(model, config)
    with pytest.raises(ValueError, match="not one of whole rows of tokens"):
        model(torch.arange(8)[None])  # no labels: its own forward, in training mode
    handle.unpatch()
