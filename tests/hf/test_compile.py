"""Compiled layers of a patched model: the engine is not traced, and no result changes."""

from torch._dynamo.utils import counters

from longctx_patch.memory.policies import CheckpointPolicy
from tests.harness import run_distributed
from tests.hf.tiny import tiny_model
from tests.memory.trained import Gradients, Trained, assert_near


def train(policy: CheckpointPolicy, *, compiled: bool) -> tuple[Gradients, int, int, list[int]]:
    """(the second step, messages, kernel calls, graphs after each step)."""
    it = Trained(tiny_model(), length=37, ulysses_degree=2, checkpoint=policy)
    if compiled:
        for layer in it.handle.model.get_decoder().layers:
            layer.compile(backend="aot_eager")
    graphs = []
    for _ in range(2):
        found = it.step()
        graphs.append(counters["stats"]["unique_graphs"])
    it.handle.unpatch()
    totals = it.handle.counters
    return found, totals.messages, totals.kernel_calls, graphs


def check(rank: int) -> None:
    policies: tuple[CheckpointPolicy, ...] = ("none", "attention")
    for policy in policies:
        eager, *sent, _ = train(policy, compiled=False)
        found, *sent_compiled, graphs = train(policy, compiled=True)
        assert sent_compiled == sent
        assert_near(found, eager, 1e-5)
        assert graphs[1] == graphs[0] > 0, "a batch of the same length is compiled no more"
    for reason in counters["graph_break"]:
        assert "torch.compiler.disable" in reason


def test_compiled_layers_are_exact_and_compiled_once() -> None:
    run_distributed(check, 2)
