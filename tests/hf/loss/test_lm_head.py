"""The loss inside the head equals that from full logits, for every family and head. A head that
can't compute the loss returns full logits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from longctx_patch import LongContextConfig, PatchHandle, patch
from longctx_patch.config import LossName
from tests.harness import run_distributed
from tests.hf import steps
from tests.hf.steps import TOLERANCE
from tests.hf.tiny import (
    ONE_OF_EACH,
    SUPPORTED,
    VOCABULARY,
    featured_model,
    gradients,
    mean_over_ranks,
    precise_model,
    tiny_model,
    token_rows,
)
from tests.memory.trained import assert_near
from tests.reference import relative_error

LENGTH = 19


def collated(handle: PatchHandle) -> dict[str, Tensor]:
    """Two rows, one of them without loss in its first part."""
    first, second = token_rows(LENGTH)
    return steps.collated(
        handle, [first, second | {"labels": [-100] * 8 + second["input_ids"][8:]}]
    )


@contextmanager
def seen_by(head: nn.Module) -> Iterator[list[int]]:
    """The number of dimensions of each output of a head: 0 for a loss, 3 for logits. The hook is on
    all modules, because a hook on the head would switch the loss inside it off."""
    dims: list[int] = []

    def look(module: nn.Module, _: Any, out: Any) -> None:
        if module is head:
            dims.append(out.ndim)

    hook = register_module_forward_hook(look)
    yield dims
    hook.remove()


def step(model: Any, loss: LossName) -> dict[str, Tensor]:
    """Loss and gradients of a patched model; gradients of parameters, by name."""
    handle = patch(model, LongContextConfig(loss=loss))
    found = patched_step(model, handle, loss)
    handle.unpatch()
    assert "forward" not in vars(handle.model.get_output_embeddings())
    return found


def patched_step(model: Any, handle: PatchHandle, loss: LossName) -> dict[str, Tensor]:
    out = model(**collated(handle))
    out.loss.backward()
    assert (out.logits is None) == (loss == "chunked")
    return {"loss": out.loss.detach(), **gradients(model)}


assert_close = partial(assert_near, bound=TOLERANCE)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_every_kind_of_family(family: str) -> None:
    """That the chunked loss of each family is exact is in `tests/hf/test_exact_families.py`."""
    model = precise_model(family)
    with seen_by(model.get_output_embeddings()) as seen:
        found = step(model, "chunked")
    assert seen == [0], "the head returned logits"
    assert_close(found, step(precise_model(family), "logits"))


RULED = [family.model_type for family in SUPPORTED.values() if family.logits]


@pytest.mark.parametrize("family", RULED)
def test_what_the_family_does_to_logits_matters_and_stays(family: str) -> None:
    rule = SUPPORTED[family].logits
    assert rule is not None
    model = featured_model(family)
    holder = model.config if rule.holder == "config" else model
    number = getattr(holder, rule.attribute)
    loss = step(model, "chunked")["loss"]
    assert getattr(holder, rule.attribute) == number
    other = featured_model(family)
    neutral = None if rule.operation == "softcap" else 1.0
    # Past the checks of Gemma 3n's config, which wants a number.
    vars(other.config if rule.holder == "config" else other)[rule.attribute] = neutral
    without = step(other, "chunked")["loss"]
    assert relative_error(loss, without) > 100 * TOLERANCE
    with torch.no_grad():
        vars(holder)[rule.attribute] = neutral
        logits = model(**collated(patch(model, LongContextConfig()))).loss
    assert relative_error(logits, without) < TOLERANCE, "the number is read in each pass"


class OtherLinear(nn.Linear):
    """A linear layer that computes in its own way, as quantised heads do."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def with_head(head: nn.Module) -> Any:
    model = tiny_model()
    torch.manual_seed(1)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.lm_head = head
    return model


def with_adapter(model: Any = None, **options: Any) -> Any:
    model = get_peft_model(
        model or tiny_model(), LoraConfig(r=4, init_lora_weights=False, **options)
    )
    return model.train()


HEADS: dict[str, tuple[Callable[[], Any], bool]] = {
    "tied": (partial(tiny_model, tie_word_embeddings=True), True),
    "with a bias": (lambda: with_head(nn.Linear(64, VOCABULARY)), True),
    "in float64": (partial(tiny_model, dtype=torch.float64), True),
    "frozen below adapters": (lambda: with_adapter(target_modules=["q_proj"]), True),
    "another module": (lambda: with_head(OtherLinear(64, VOCABULARY, bias=False)), False),
    "an adapter": (lambda: with_adapter(target_modules=["q_proj", "lm_head"]), False),
    "trained beside adapters": (
        lambda: with_adapter(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        True,
    ),
    "trained beside adapters, tied": (
        lambda: with_adapter(
            tiny_model(tie_word_embeddings=True),
            target_modules=["q_proj"],
            modules_to_save=["embed_tokens"],
            ensure_weight_tying=True,
        ),
        True,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_of_head(kind: str) -> None:
    """Heads that can't compute the loss inside return full logits; both losses are equal."""
    build, is_chunked = HEADS[kind]
    torch.manual_seed(0)
    model = build()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with seen_by(base.get_output_embeddings()) as seen:
        found = step(model, "chunked")
    assert seen == [0 if is_chunked else 3]
    torch.manual_seed(0)
    assert_close(found, step(build(), "logits"))


@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_head_that_is_wrapped_after_the_patch(options: dict[str, Any]) -> None:
    """Neither the patched head inside a wrapper nor a copy of it runs the loss inside."""

    def trained(loss: LossName) -> dict[str, Tensor]:
        torch.manual_seed(0)
        handle = patch(tiny_model(), LongContextConfig(loss=loss))
        adapter = LoraConfig(
            r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **options}
        )
        model: Any = get_peft_model(handle.model, adapter).train()
        with torch.no_grad():  # the copied head differs from the original
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(-1)
        return patched_step(model, handle, loss)

    assert_close(trained("chunked"), trained("logits"))


def test_a_head_that_was_copied_while_patched_is_patched_again() -> None:
    """PEFT's modules_to_save leaves such a head after a merge."""
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    model.lm_head = copy.deepcopy(model.lm_head)
    handle.unpatch()
    with seen_by(model.lm_head) as seen:
        step(model, "chunked")
    assert seen == [0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
def test_hooks_on_the_head_are_heard(family: str) -> None:
    def trained(loss: LossName) -> dict[str, Tensor]:
        model = featured_model(family).train()
        handle = patch(model, LongContextConfig(loss=loss))
        model.lm_head.register_forward_hook(lambda *given: given[-1] * 0.5)
        return patched_step(model, handle, loss)

    assert_close(trained("chunked"), trained("logits"))


BFLOAT16_OUT = MixedPrecisionPolicy(output_dtype=torch.bfloat16)


def fsdp_step(tied: bool, loss: LossName, policy: MixedPrecisionPolicy | None) -> dict[str, Tensor]:
    """`policy`: the head is a unit of FSDP2 with this policy; None: it belongs to the model's."""
    model: Any = tiny_model(tie_word_embeddings=tied)
    handle = patch(model, LongContextConfig(ring_degree=2, loss=loss))
    for layer in model.model.layers:
        fully_shard(layer)
    if policy is not None:
        fully_shard(model.lm_head, mp_policy=policy)
    fully_shard(model)
    out = model(**collated(handle))
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    return {"loss": mean_over_ranks(out.loss.detach())} | grads


def check_fsdp(rank: int) -> None:
    for tied, policy in (
        (True, None),
        (False, None),
        (False, MixedPrecisionPolicy()),
        (False, BFLOAT16_OUT),
    ):
        wanted = fsdp_step(tied, "logits", None)
        assert_close(fsdp_step(tied, "chunked", policy), wanted)


def test_fsdp2() -> None:
    run_distributed(check_fsdp, 2)
