"""Compiled layers of a patched model: the engine is not traced, and no result changes."""

from torch import Tensor
from torch._dynamo.utils import counters

from longctx_patch import LongContextConfig, patch
from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.steps import collated
from tests.hf.tiny import tiny_model, token_rows
from tests.reference import relative_error

STEPS = 2


def train(policy: CheckpointPolicy, *, compiled: bool) -> tuple[list[Tensor], int, int, list[int]]:
    """(loss and gradients of the last step, messages, kernel calls, graphs after each step)."""
    model = tiny_model()
    handle = patch(model, LongContextConfig(ulysses_degree=2, checkpoint=policy))
    if compiled:
        for layer in handle.model.get_decoder().layers:
            layer.compile(backend="aot_eager")
    model.train()
    graphs = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(**collated(handle, token_rows(37))).loss
        loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    totals = handle.counters
    handle.unpatch()
    return [loss.detach(), *grads], totals.messages, totals.kernel_calls, graphs


def check(rank: int) -> None:
    policies: tuple[CheckpointPolicy, ...] = ("none", "attention")
    for policy in policies:
        eager, *sent, _ = train(policy, compiled=False)
        found, *sent_compiled, graphs = train(policy, compiled=True)
        assert sent_compiled == sent
        for tensor, wanted in zip(found, eager, strict=True):
            assert relative_error(tensor, wanted) < 1e-5
        assert graphs[1] == graphs[0] > 0, "a batch of the same length is compiled no more"
    for reason in counters["graph_break"]:
        assert "torch.compiler.disable" in reason


def test_compiled_layers_are_exact_and_compiled_once() -> None:
    run_distributed(check, 2)
