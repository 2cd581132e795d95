"""The loss inside the head equals that from full logits, for every family and head; where it can't
be there, full logits are used; every other pass is the stock one."""

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from transformers.modeling_outputs import CausalLMOutputWithPast

from longctx_patch import LongContextConfig, PatchHandle, SequenceShardCollator, patch
from longctx_patch.config import LossName
from longctx_patch.hf.families import FAMILIES
from tests.harness import run_distributed
from tests.hf.tiny import VOCABULARY, featured_model, tiny_model, token_rows
from tests.reference import relative_error

TOLERANCE = 1e-5
LENGTH = 19
Rows = list[dict[str, list[int]]]


def rows() -> Rows:
    """One of them without loss in its first part."""
    first, second = token_rows(LENGTH)
    return [first, second | {"labels": [-100] * 8 + second["input_ids"][8:]}]


def collated(handle: PatchHandle) -> dict[str, Tensor]:
    collate = SequenceShardCollator(handle.config, group_rank=handle.group_rank, pad_token_id=0)
    return collate(rows())


class SeenByHead:
    """Dimensions of what a head returned; by a hook on all modules, since one on the head counts
    as somebody who may change it."""

    def __init__(self, head: nn.Module) -> None:
        self.dims: list[int] = []

        def look(module: nn.Module, _: Any, out: Any) -> None:
            if module is head:
                self.dims.append(out.ndim)

        self._hook = register_module_forward_hook(look)

    def __enter__(self) -> "SeenByHead":
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def step(model: Any, loss: LossName, **options: Any) -> dict[str, Tensor]:
    """Loss and gradients of a patched model; gradients of parameters, by name."""
    handle = patch(model, LongContextConfig(loss=loss))
    out = model(**collated(handle), **options)
    out.loss.backward()
    assert (out.logits is None) == (loss == "chunked")
    handle.unpatch()
    assert "forward" not in vars(handle.model.get_output_embeddings())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return {"loss": out.loss.detach()} | grads


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative_error(found[name], value) < TOLERANCE, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = featured_model(family)
    with SeenByHead(model.get_output_embeddings()) as seen:
        found = step(model, "chunked")
    assert seen.dims == [0], "the head returned logits"
    assert_close(found, step(featured_model(family), "logits"))


RULED = [family.model_type for family in FAMILIES.values() if family.logits]


@pytest.mark.parametrize("family", RULED)
def test_what_the_family_does_to_logits_matters_and_stays(family: str) -> None:
    rule = FAMILIES[family].logits
    assert rule is not None
    model = featured_model(family)
    holder = model.config if rule.holder == "config" else model
    number = getattr(holder, rule.attribute)
    loss = step(model, "chunked")["loss"]
    assert getattr(holder, rule.attribute) == number
    other = featured_model(family)
    neutral = None if rule.operation == "softcap" else 1.0
    setattr(other.config if rule.holder == "config" else other, rule.attribute, neutral)
    without = step(other, "chunked")["loss"]
    assert relative_error(loss, without) > 100 * TOLERANCE
    with torch.no_grad():
        setattr(holder, rule.attribute, neutral)
        logits = model(**collated(patch(model, LongContextConfig()))).loss
    assert relative_error(logits, without) < TOLERANCE, "the number is read in each pass"


class OtherLinear(nn.Linear):
    """As quantised heads are: a linear layer that computes in its own way."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def with_head(head: nn.Module) -> Any:
    model = tiny_model()
    torch.manual_seed(1)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.lm_head = head
    return model


def with_adapter(**options: Any) -> Any:
    model = get_peft_model(tiny_model(), LoraConfig(r=4, init_lora_weights=False, **options))
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
        False,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_of_head(kind: str) -> None:
    """Those that the loss can't be inside of return logits to it."""
    build, is_chunked = HEADS[kind]
    torch.manual_seed(0)
    model = build()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with SeenByHead(base.get_output_embeddings()) as seen:
        found = step(model, "chunked")
    assert seen.dims == [0 if is_chunked else 3]
    torch.manual_seed(0)
    assert_close(found, step(build(), "logits"))


@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_head_that_is_wrapped_after_the_patch(options: dict[str, Any]) -> None:
    """A wrapper holds the bound module, or a copy of it: neither may run the loss inside."""

    def trained(loss: LossName) -> dict[str, Tensor]:
        torch.manual_seed(0)
        handle = patch(tiny_model(), LongContextConfig(loss=loss))
        adapter = LoraConfig(
            r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **options}
        )
        model: Any = get_peft_model(handle.model, adapter).train()
        with torch.no_grad():  # a head of its own, which the one it was copied from is not
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(-1)
        out = model(**collated(handle))
        out.loss.backward()
        return {"loss": out.loss.detach()} | {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }

    assert_close(trained("chunked"), trained("logits"))


def test_a_head_that_was_copied_while_patched_is_patched_again() -> None:
    """As PEFT's modules_to_save leaves it after a merge."""
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    model.lm_head = copy.deepcopy(model.lm_head)
    handle.unpatch()
    with SeenByHead(model.lm_head) as seen:
        step(model, "chunked")
    assert seen.dims == [0]


def test_patched_models_are_not_copied() -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    with pytest.raises(ValueError, match=r"a patched model can't be copied: .* before patch\(\)"):
        copy.deepcopy(model)
    handle.unpatch()
    copy.deepcopy(model)


def test_a_loss_that_the_model_makes_by_itself_is_refused() -> None:
    """As Liger Kernel's fused loss does, whose forward calls neither the head nor the loss."""
    for loss in ("chunked", "logits"):
        model: Any = tiny_model().train()
        handle = patch(model, LongContextConfig(loss=loss))
        batch = collated(handle)

        def forward(self: Any, labels: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
            hidden = self.model(**kwargs).last_hidden_state
            logits = hidden @ self.lm_head.weight.t()
            return CausalLMOutputWithPast(
                loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            )

        model.forward = MethodType(forward, model)
        with pytest.raises(RuntimeError, match=r"fused_linear_cross_entropy=False"):
            model(**batch)
        del model.forward
        model(**batch).loss.backward()


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
def test_hooks_on_the_head_are_heard(family: str) -> None:
    def trained(loss: LossName) -> dict[str, Tensor]:
        model = featured_model(family).train()
        handle = patch(model, LongContextConfig(loss=loss))
        model.lm_head.register_forward_hook(lambda *given: given[-1] * 0.5)
        out = model(**collated(handle))
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": out.loss.detach()} | grads

    assert_close(trained("chunked"), trained("logits"))


def test_other_passes_are_stock() -> None:
    """Without labels, of whole rows, and generating, also of the head alone."""
    stock, model = tiny_model(), tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    ids, positions = batch["input_ids"], batch["position_ids"]
    unlabelled = {name: value for name, value in batch.items() if "labels" not in name}
    wanted = stock(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model(**unlabelled).logits, wanted)
    assert torch.equal(model(**unlabelled, logits_to_keep=2).logits, wanted[:, -2:])
    hidden = torch.randn(2, 3, 64)
    assert torch.equal(model.lm_head(hidden), stock.lm_head(hidden))
    for each in (stock, model):
        each.eval()
    whole = {"input_ids": ids, "labels": ids}
    found, expected = model(**whole), stock(**whole)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    words = [
        each.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for each in (model, stock)
    ]
    assert torch.equal(*words)


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_and_in_evaluation(training: bool) -> None:
    losses = []
    for name in ("chunked", "logits"):
        model = tiny_model().train(training)
        handle = patch(model, LongContextConfig(loss=name))
        with torch.no_grad():
            out = model(**collated(handle))
        losses.append(out.loss)
        assert not out.loss.requires_grad
        assert (out.logits is None) == (name == "chunked")
    assert relative_error(*losses) < TOLERANCE


def test_outputs_as_a_tuple() -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    asked = {"output_hidden_states": True, "use_cache": False}
    outputs, wanted = model(**batch, **asked, return_dict=False), model(**batch, **asked)
    loss, hidden_states = outputs
    assert torch.equal(loss, wanted.loss)
    assert len(hidden_states) == len(wanted.hidden_states) == 3


def test_a_failed_pass_leaves_nothing_open() -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)

    def fail(*_: Any) -> None:
        raise KeyError("in the last norm")

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(KeyError, match="in the last norm"):
        model(**batch)
    hook.remove()
    assert model.lm_head(torch.randn(2, 64)).shape == (2, VOCABULARY)
    assert model(**batch).loss.requires_grad


def test_a_forward_that_is_called_past_its_hooks_takes_full_logits() -> None:
    """As wrappers of other libraries may do."""
    model = tiny_model()
    handle = patch(model, LongContextConfig())
    batch = collated(handle)
    wanted = model(**batch).loss
    for share in (1.0, 0.5):  # nothing is kept from the first to the second
        out = model.forward(**batch, num_valid_tokens=int((LENGTH - 1 + LENGTH - 8) / share))
        assert out.logits.shape == (*batch["labels"].shape, VOCABULARY)
        assert relative_error(out.loss, share * wanted) < TOLERANCE


def refused(match: str, error: type[Exception] = ValueError, **changes: Any) -> Any:
    return pytest.param(changes, error, match, id=match)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        refused("logits_to_keep=2 with labels of a sharded batch", logits_to_keep=2),
        refused(r"logits_to_keep=tensor \[2\]", logits_to_keep=torch.tensor([0, 1])),
        refused(f"label {VOCABULARY}: labels are from 0 to {VOCABULARY - 1}", label=VOCABULARY),
        refused("label -1: labels are from 0", label=-1),
        refused(r"labels \[2, 18\] for tokens \[2, 19\]: each token of the shard has one", drop=1),
    ],
)
@pytest.mark.parametrize("loss", ["chunked", "logits"])
def test_what_can_not_be_right(
    loss: LossName, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_model()
    handle = patch(model, LongContextConfig(loss=loss))
    batch: dict[str, Any] = collated(handle)
    options = dict(changes)
    if "label" in options:
        batch["labels"][0, 3] = batch["shift_labels"][0, 3] = options.pop("label")
    if drop := options.pop("drop", 0):
        for name in ("labels", "shift_labels"):
            batch[name] = batch[name][:, :-drop]
    with pytest.raises(error, match=message):
        model(**batch, **options)


def test_logits_that_change_on_their_way_are_noticed() -> None:
    model: Any = tiny_model()
    handle = patch(model, LongContextConfig())

    def forward(self: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = 2 * self.lm_head(self.model(**kwargs).last_hidden_state)
        loss = self.loss_function(logits, labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model.forward = MethodType(forward, model)
    with pytest.raises(RuntimeError, match=r"something changes the logits .*loss='logits'"):
        model(**collated(handle))


BFLOAT16_OUT = MixedPrecisionPolicy(output_dtype=torch.bfloat16)


def fsdp_step(tied: bool, loss: LossName, policy: MixedPrecisionPolicy | None) -> dict[str, Tensor]:
    """`policy`: of the head by itself; None: the head belongs to the whole model."""
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


def mean_over_ranks(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


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
