"""Rehearsals under `auto` where layers can be offloaded to a host of limited memory: the CPU stands
in for a GPU with a host, and offloaded bytes count as the host's."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from longctx_patch.hf.layers.checkpointing import LayerCheckpoints
from longctx_patch.memory import offload
from longctx_patch.memory.offload import HostRoom
from tests.hf import trained
from tests.hf.tiny import VOCABULARY, tiny_model
from tests.hf.trained import LAYERS, PLENTY
from tests.memory.live_bytes import LiveBytes

LENGTH = 384
LAYER_BYTES = LENGTH * 528
"""Bytes that one layer offloads."""


class Host:
    """Host memory that layers may offload to."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0
        self.addresses: set[int] = set()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make_slot = offload._Slot.__init__

        def made(slot: Any, num_bytes: int, *, pinned: bool) -> None:
            with _disable_current_modes():
                make_slot(slot, num_bytes, pinned=pinned)
            storage = slot.memory.untyped_storage()
            self.addresses.add(storage.data_ptr())
            self.taken_bytes += num_bytes
            weakref.finalize(storage, self._free, storage.data_ptr(), num_bytes)

        monkeypatch.setattr(offload._Slot, "__init__", made)
        monkeypatch.setattr(
            HostRoom, "now", lambda: HostRoom(self.total_bytes - self.taken_bytes, 0)
        )
        monkeypatch.setattr(LayerCheckpoints, "_lowest", lambda *_: "offload")

    def _free(self, address: int, num_bytes: int) -> None:
        self.addresses.discard(address)
        self.taken_bytes -= num_bytes


class DeviceBytes(LiveBytes):
    """A meter of all live bytes except those on the host."""

    def __init__(self, host: Host, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._host = host

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self._host.addresses:
            super()._note(storage)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    gc.collect()
    warnings.simplefilter("ignore")  # the warning that the host is full
    host = Host(PLENTY)
    host.stand_in(monkeypatch)
    return host


class Run(trained.Run):
    """A run whose peak memory is given as a share of the capacity."""

    def __init__(
        self, meter: LiveBytes, *, layers: int = LAYERS, vocab_size: int = VOCABULARY, **config: Any
    ) -> None:
        model = tiny_model(num_hidden_layers=layers, vocab_size=vocab_size)
        super().__init__(meter, model=model, length=LENGTH, rows=1, **config)
        self.meter = meter

    def share_of_a_step(self) -> float:
        self.meter.reset_peak()
        self.train()
        return self.meter.peak() / self.meter.capacity()


def expected(host: Host, checkpoint: str = "auto", **config: Any) -> int:
    with DeviceBytes(host, PLENTY) as meter:
        return Run(meter, checkpoint=checkpoint, **config).rehearse().expected_bytes


@pytest.mark.parametrize("loss", ["logits", "chunked"])
def test_what_the_least_fits_into_is_not_refused(host: Host, loss: str) -> None:
    """A rehearsal leaves one layer whole; `auto` need not, so that layer isn't counted."""
    settings: dict[str, Any] = {"loss": loss, "vocab_size": 1500}
    offloaded = expected(host, "offload", **settings)
    with DeviceBytes(host, int(1.03 * offloaded)) as meter:
        run = Run(meter, checkpoint="auto", **settings)
        run.rehearse()
        assert max(run.share_of_a_step() for _ in range(3)) <= 1


LARGE_LOSS: dict[str, Any] = {"loss": "logits", "vocab_size": 1500}


@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        *((layers, {}) for layers in (0, 1.5, LAYERS)),
        (LAYERS - 0.5, LARGE_LOSS),
    ],
)
def test_what_has_no_room_on_the_host_is_expected_to_stay(
    host: Host, layers: float, settings: dict[str, Any]
) -> None:
    """Layers without room on the host count on the GPU; the last layer is the first to stay."""
    host.total_bytes = int(layers * LAYER_BYTES)
    found = expected(host, **settings)
    gc.collect()
    with DeviceBytes(host, 1) as meter:
        run = Run(meter, checkpoint="auto", **settings)
        for _ in range(2):  # the pass that measures, and the one with the least policies
            run.share_of_a_step()
        peak = run.share_of_a_step() * meter.capacity()
    assert set(run.letters) == {"o"}
    assert peak <= found * 1.01
    assert found <= peak * 1.12


def test_a_host_that_was_full_may_have_room_later(host: Host) -> None:
    most = int(1.9 * expected(host, layers=12))
    host.total_bytes = int(3.2 * LAYER_BYTES)
    with DeviceBytes(host, most) as meter:
        run = Run(meter, checkpoint="auto", layers=12)
        run.rehearse()
        run.share_of_a_step()
        host.total_bytes = PLENTY
        run.length = int(1.9 * LENGTH)
        assert max(run.share_of_a_step() for _ in range(4)) <= 1


def test_a_pass_that_was_interrupted_is_forgotten(host: Host) -> None:
    most = int(1.3 * expected(host))
    with DeviceBytes(host, most) as meter:
        run = Run(meter, checkpoint="auto")

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError

        hook = run.model.get_decoder().layers[-1].register_forward_hook(full)
        with pytest.raises(torch.OutOfMemoryError):
            run.loss()
        hook.remove()
        run.rehearse()
        assert max(run.share_of_a_step() for _ in range(4)) <= 1
        assert "n" not in run.letters[:-1]


def test_offloading_layers_are_rehearsed_within_a_run(host: Host) -> None:
    host.total_bytes = int(9.2 * LAYER_BYTES)
    with DeviceBytes(host, PLENTY) as meter:
        run = Run(meter, checkpoint="offload")
        run.share_of_a_step()
        found = run.rehearse(has_optimizer_states=True)
        peak = run.share_of_a_step() * meter.capacity()
    assert peak <= found.expected_bytes * 1.01
    assert found.expected_bytes <= peak * 1.12


def test_a_rehearsal_within_a_run_knows_what_it_holds_on_the_host(host: Host) -> None:
    most = int(1.1 * expected(host))
    gc.collect()
    host.total_bytes = int(9.2 * LAYER_BYTES)
    with DeviceBytes(host, most) as meter:
        run = Run(meter, checkpoint="auto")
        for _ in range(3):
            run.share_of_a_step()
        before = run.letters
        run.rehearse(has_optimizer_states=True)
        assert run.share_of_a_step() <= 1
        assert run.letters == before
