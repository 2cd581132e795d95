"""A rehearsal with three layers predicts the memory of all layers and leaves no trace."""

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from longctx_patch.hf.preflight import WillNotFit, preflight
from longctx_patch.memory.limits import MARGIN
from longctx_patch.memory.policies import CheckpointPolicy, LayerPolicy
from tests.harness import run_distributed
from tests.hf import trained
from tests.hf.tiny import gradients, tiny_model
from tests.hf.trained import LAYERS, PLENTY
from tests.memory.live_bytes import LiveBytes

Run = partial(trained.Run, length=96, rows=2)


@pytest.mark.parametrize("policy", ["none", "full", "attention"])
def test_what_is_expected_is_what_a_step_takes(policy: LayerPolicy) -> None:
    with LiveBytes(PLENTY) as meter:
        run = Run(meter, checkpoint=policy)
        before = [dict(vars(layer)) for layer in run.model.get_decoder().layers]
        found = run.rehearse()
        assert [dict(vars(layer)) for layer in run.model.get_decoder().layers] == before
        run.train()  # the first step makes the optimizer's states
        meter.reset_peak()
        run.loss().backward()
        peak = meter.peak()
    assert found.policy == policy
    assert peak <= found.expected_bytes * 1.01
    assert found.expected_bytes <= peak * 1.12
    assert found.fits


def test_gradients_stay_between_the_forwards_of_a_step() -> None:
    with LiveBytes(PLENTY) as meter:
        run = Run(meter, checkpoint="attention")
        once = run.rehearse()
        found = run.rehearse(num_forwards=2)
        run.train()
        run.loss().backward()
        meter.reset_peak()
        run.loss().backward()
        peak = meter.peak()
    assert once.expected_bytes < peak <= found.expected_bytes * 1.01
    assert found.expected_bytes <= peak * 1.12


@pytest.mark.parametrize("capacity", [1.0, 1.3, 2.5])
def test_auto_begins_as_measuring_would_have_ended(capacity: float) -> None:
    """The first pass after a rehearsal has the policies that passes without one end with, and no
    pass exceeds the capacity. `capacity` is in units of the step that keeps the least."""
    policies: dict[bool, list[tuple[LayerPolicy, ...]]] = {True: [], False: []}
    with LiveBytes(PLENTY) as meter:
        run = Run(meter, checkpoint="attention")
        least = run.rehearse()
    for rehearses in policies:
        with LiveBytes(PLENTY) as meter:
            run = Run(meter, checkpoint="auto")
            meter.capacity_bytes = int(capacity * least.expected_bytes / (1 - MARGIN))
            if rehearses:
                run.rehearse()
            meter.reset_peak()
            for _ in range(5):
                run.train()
                policies[rehearses].append(run.handle.checkpointing.policies)
                assert meter.peak() <= meter.capacity_bytes
    whole = [found.count("none") for found in policies[True]]
    assert whole[0] <= whole[-1] <= whole[0] + 1  # measuring may allow one more than the bound
    assert policies[True][-1] == policies[False][-1]
    if capacity == 2.5:
        assert whole[0] == LAYERS > policies[False][0].count("none")


def test_it_leaves_no_trace() -> None:
    """Losses, random numbers, gradients and the check of the first step are as without it."""
    losses = {}
    for rehearses in (False, True):
        torch.manual_seed(3)
        with LiveBytes(PLENTY) as meter:
            run = Run(meter, checkpoint="auto")
            if rehearses:
                found = run.rehearse()
                assert found.policy == "attention"  # a CPU's memory is the host's
                assert "take at least" in str(found)
                assert "'attention'; this is the least, and 'auto' uses what is left)" in str(found)
                assert all(parameter.grad is None for parameter in run.model.parameters())
                assert run.handle.first_step is None
            losses[rehearses] = [run.train() for _ in range(3)], torch.rand(2), gradients(run.model)
            assert run.handle.first_step is not None
            assert run.handle.first_step.has_run_forward
            assert run.handle.checkpointing.num_whole_layers == LAYERS
    assert torch.equal(torch.stack(losses[False][0]), torch.stack(losses[True][0]))
    assert torch.equal(losses[False][1], losses[True][1])


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_what_does_not_fit_is_refused_with_its_numbers(policy: CheckpointPolicy) -> None:
    with LiveBytes(PLENTY) as meter:
        found = Run(meter, checkpoint=policy).rehearse()
        run = Run(meter, checkpoint=policy)
        meter.capacity_bytes = found.expected_bytes - 1
        with pytest.raises(
            WillNotFit, match=r"a step is expected to take .* GiB of the .*rank\(s\) \[0\]"
        ):
            preflight(run.handle, run.loss)
        assert not run.handle._checkpoints.is_rehearsed
        assert run.handle.checkpointing.memory is None
        run.train()


def test_what_fits_without_gaps_only_is_warned_of() -> None:
    with LiveBytes(PLENTY) as meter:
        run = Run(meter, checkpoint="full")
        expected = run.rehearse().expected_bytes
        meter.capacity_bytes = int(1.1 * expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.rehearse()
        meter.fill = 0.7
        with pytest.warns(RuntimeWarning, match="expandable_segments:True before CUDA starts"):
            assert run.rehearse().fits


def test_a_rehearsal_out_of_memory_holds_nothing() -> None:
    """Nothing stays allocated while the error is alive, as in a notebook, where users retry."""
    with LiveBytes(PLENTY) as meter:
        run = Run(meter, checkpoint="none")
        before = meter.allocated()

        def loss() -> Tensor:
            activations = run.loss()
            assert activations.grad_fn is not None
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(
            WillNotFit, match="3 of 7 layers do not fit: CUDA out of memory"
        ) as full:
            preflight(run.handle, loss)
        assert full.value.__cause__ is not None
        gc.collect()
        assert meter.allocated() == before


def test_when_it_can_not_tell() -> None:
    assert preflight((run := Run(None)).handle, run.loss) is None
    with LiveBytes(PLENTY) as meter:
        run = Run(meter)
        run.loss().backward()
        with pytest.raises(ValueError, match="parameters have gradients already"):
            preflight(run.handle, run.loss)
        in_one_layer = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
        not_alike = get_peft_model(tiny_model(num_hidden_layers=LAYERS), in_one_layer)
        for model in (tiny_model(num_hidden_layers=2), not_alike):
            run = Run(meter, model=model)
            assert preflight(run.handle, run.loss) is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: run.model.eval(), "not training: call model.train"),
        (
            lambda run: run.model.requires_grad_(False),
            "no parameter of the model requires a gradient",
        ),
        (lambda run: run.handle.unpatch(), "not patched any more"),
        (
            lambda run: next(run.model.parameters()).register_post_accumulate_grad_hook(print),
            "such as an optimizer in backward",
        ),
    ],
)
def test_wrong_moments_are_refused(spoil: Any, says: str) -> None:
    run = Run(LiveBytes(PLENTY))
    spoil(run)
    with pytest.raises(ValueError, match=says):
        preflight(run.handle, run.loss)


def test_a_pass_without_gradients_keeps_nothing() -> None:
    """A pass under no_grad before the trained one, for a reference say, doesn't count."""
    expected = []
    for has_reference in (False, True):
        with LiveBytes(PLENTY) as meter:
            run = Run(meter, checkpoint="auto")

            def loss(run: trained.Run = run, has_reference: bool = has_reference) -> Tensor:
                if has_reference:
                    with torch.no_grad():
                        run.loss()
                return run.loss()

            expected.append(preflight(run.handle, loss))
    assert expected[0] == expected[1]


@pytest.mark.parametrize(
    ("policy", "loss_of", "says"),
    [
        ("attention", lambda run: run.loss() + run.loss(), r"ran 6 of .*leave preflight out"),
        ("auto", lambda run: run.model.lm_head.weight.sum(), "ran 0 of the last 3 layers"),
    ],
)
def test_only_one_pass_through_the_layers_is_rehearsed(
    policy: CheckpointPolicy, loss_of: Any, says: str
) -> None:
    run = Run(LiveBytes(PLENTY), checkpoint=policy)
    with pytest.raises(ValueError, match=says):
        preflight(run.handle, lambda: loss_of(run))


def check_on_two_ranks(rank: int) -> None:
    """A model under FSDP2 over the ranks of a sequence is refused where one rank lacks memory."""
    losses = []
    for capacity in (None, PLENTY, 0):
        # The meter isn't entered: FSDP2 can't run inside it, and bytes don't matter here.
        meter = LiveBytes(PLENTY if capacity is None or rank == 0 else capacity)
        run = Run(meter, shards=True, ulysses_degree=2, checkpoint="attention")
        if capacity:
            run.rehearse()
        elif capacity == 0:
            with pytest.raises(WillNotFit, match=r"does not fit on rank\(s\) \[1\]"):
                preflight(run.handle, run.loss)
        losses.append(torch.stack([run.train() for _ in range(2)]))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def check_auto_on_two_ranks(rank: int) -> None:
    """One rank has memory only for the least policies, and both ranks begin with these."""
    losses, policies = [], []
    for rehearses in (False, True):
        with LiveBytes(PLENTY) as meter:
            run = Run(meter, ring_degree=2, checkpoint="auto")
            if rehearses:
                found = run.rehearse()
                # Rank 0 has just the memory that its rehearsal expects.
                meter.capacity_bytes = PLENTY if rank else int(found.expected_bytes / (1 - MARGIN))
            losses.append(torch.stack([run.train() for _ in range(2)]))
            policies.append(run.handle.checkpointing.policies)
    assert torch.equal(*losses)
    assert policies[0] == ("none",) * LAYERS
    assert policies[1].count("attention") > 0
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, policies[1])
    assert everyone[0] == everyone[1]


def check_all(rank: int) -> None:
    check_on_two_ranks(rank)
    check_auto_on_two_ranks(rank)


def test_on_two_ranks() -> None:
    run_distributed(check_all, 2)
