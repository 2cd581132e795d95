"""Tensors that layers keep on the host: when they come back, and that memory is reused."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from longctx_patch import LongContextConfig, patch
from longctx_patch.memory import host as host_module
from longctx_patch.memory.meter import CudaMeter
from longctx_patch.memory.offload import HostCopies, HostMemoryFull, HostRoom
from longctx_patch.memory.replay import Getter
from longctx_patch.memory.run_layer import run_layer
from tests.hf.tiny import gradients, tiny_model
from tests.memory.trained import Trained, assert_equal

CPU = torch.device("cpu")


class Watched(HostCopies):
    """Records in which order tensors (named by their first number) come back."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.came: list[float] = []

    def bring_back(self, held: object) -> Tensor:
        back = super().bring_back(held)  # type: ignore[arg-type]
        self.came.append(back.flatten()[0].item())
        return back


def layers_of(host: HostCopies, count: int) -> tuple[list[object], list[list[Getter]]]:
    """`count` layers with two tensors each: 10 and 11, 20 and 21, ..."""
    kept = [host.begin() for _ in range(count)]
    getters = [
        [layer.keep(torch.full((3,), 10.0 * n + i)) for i in range(2)]
        for n, layer in enumerate(kept, 1)
    ]
    return list(kept), getters


def test_a_layer_comes_back_while_the_one_after_it_is_in_backward() -> None:
    host = Watched()
    kept, getters = layers_of(host, 3)
    assert getters[2][0]().tolist() == [30.0] * 3
    assert host.came == [30, 31, 20, 21]
    assert [get().tolist()[0] for get in (getters[2][1], getters[1][0])] == [31, 20]
    assert host.came == [30, 31, 20, 21, 10, 11]
    assert len(kept) == 3


@pytest.mark.parametrize(("most", "comes"), [(23, False), (24, True)])
def test_large_layers_come_when_they_are_asked_for(most: int, comes: bool) -> None:
    """A layer of two tensors of 12 bytes comes back ahead only if 24 bytes may."""
    host = Watched()
    host.most_ahead = most
    kept, getters = layers_of(host, 2)
    getters[1][0]()
    assert host.came == [20, 21, 10, 11][: 4 if comes else 2]
    assert getters[0][1]().tolist() == [11.0] * 3
    assert getters[1][1]().tolist() == [21.0] * 3
    assert kept


def test_memory_is_used_again_once_nobody_can_ask_for_it() -> None:
    host = HostCopies(CPU)
    for _ in range(3):
        kept, getters = layers_of(host, 4)
        assert host.num_bytes == 4 * 2 * 3 * 4
        assert getters[0][0]().tolist() == [10.0] * 3
        del kept, getters
        gc.collect()
    kept, getters = layers_of(host, 5)
    assert host.num_bytes == 5 * 2 * 3 * 4
    assert kept
    assert getters


def test_a_longer_row_takes_the_place_of_a_shorter_one() -> None:
    """Rows of many lengths in turn take the memory of the longest, not buffers of every length."""
    host = HostCopies(CPU)
    for length in (8, 5, 16, 3, 16, 24):
        kept = [host.begin() for _ in range(4)]
        getters = [
            [layer.keep(torch.full((n,), float(n))) for n in (length, 2 * length)] for layer in kept
        ]
        assert [[get().tolist() for get in layer] for layer in getters] == [
            [[float(length)] * length, [2.0 * length] * 2 * length]
        ] * 4
        del kept, getters
        gc.collect()
    assert host.num_bytes == 4 * 4 * (24 + 48)


def test_small_tensors_of_other_layers_do_not_take_the_place_of_large_ones() -> None:
    """Recurrent layers keep what came of other ranks where others keep attention's results."""
    host = HostCopies(CPU)
    for length in (8, 16, 5):
        kept = [host.begin() for _ in range(6)]
        getters = []
        for number, layer in enumerate(kept):
            hidden = layer.keep(torch.full((1, length, 4), float(number)))
            came = torch.full((3,), float(number)), torch.ones(2)
            results = torch.full((1, length, 2, 2), float(number)), torch.ones(1, 2, length)
            getters += [hidden, *map(layer.keep, came if number % 3 else results)]
        found = [get().flatten()[0].item() for get in getters]
        assert found == [0, 0, 1, 1, 1, 1, 2, 2, 1, 3, 3, 1, 4, 4, 1, 5, 5, 1]
        del kept, getters, hidden, layer
        gc.collect()
    assert host.num_bytes == 4 * (6 * 16 * 4 + 2 * (16 * 4 + 2 * 16) + 4 * (3 + 2))


def test_nothing_takes_no_memory() -> None:
    """A rank may hold no token whose attention is kept, and CUDA can't pin an empty buffer."""
    host = HostCopies(CPU)
    kept = host.begin()
    getters = [kept.keep(torch.empty(2, 0, 3)), kept.keep(torch.ones(3))]
    assert getters[0]().shape == (2, 0, 3)
    assert getters[1]().tolist() == [1.0] * 3
    assert host.num_bytes == 12
    assert not any(slot.memory.nbytes == 0 for slots in host._free.values() for slot in slots)


def room_for(num_bytes: int) -> HostRoom:
    return HostRoom(available=num_bytes + 10, reserve=10)


def test_a_full_host_is_refused_with_its_numbers() -> None:
    host = HostCopies(CPU)
    kept = host.begin()
    host.room = lambda: room_for(12)
    kept.keep(torch.ones(3))
    host.room = lambda: room_for(11)
    with pytest.raises(HostMemoryFull, match=r"need 0\.00 GiB of host memory more.*'attention'"):
        kept.keep(torch.ones(3))


def test_what_others_will_take_is_left_free() -> None:
    """Bytes that are reserved, for an optimizer's states say, stay free on the host."""
    model = tiny_model()
    handle = patch(model, LongContextConfig(checkpoint="offload"))
    handle.reserve_host(5)
    host = handle._checkpoints.new_host(CPU)
    host.room = lambda: room_for(12)
    kept = host.begin()
    with pytest.raises(HostMemoryFull):
        kept.keep(torch.ones(2))
    handle._checkpoints._host = host
    handle.reserve_host(4)
    kept.keep(torch.ones(2))
    assert host.num_bytes == 8


def test_what_all_layers_would_take_is_refused_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layers of all processes of the machine count together."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for room, fits in ((2 * 3 * 12, True), (2 * 3 * 12 - 1, False)):
        host = HostCopies(CPU, num_layers=4)
        host.room = partial(room_for, room)
        host.begin()  # an evaluation, which keeps nothing
        first = host.begin()
        get = first.keep(torch.ones(3))
        if fits:
            assert host.begin()
        else:
            with pytest.raises(HostMemoryFull, match="the layers of 2 processes need"):
                host.begin()
        assert get().tolist() == [1.0] * 3


def test_or_what_has_no_room_stays() -> None:
    host = HostCopies(CPU, must_leave=False)
    host.room = lambda: room_for(11)
    kept = host.begin()
    with pytest.warns(RuntimeWarning, match="so no more is offloaded than"):
        get = kept.keep(torch.full((3,), 7.0))
    host.room = lambda: room_for(12)
    then = kept.keep(torch.full((3,), 8.0))
    assert [get().tolist(), then().tolist()] == [[7.0] * 3, [8.0] * 3]
    assert host.num_bytes == 12


def test_little_room_is_left_to_others() -> None:
    room = HostRoom.now()
    assert 0 < room.reserve < 0.06 * host_module.total_bytes()
    assert room.available > 0


def test_a_layer_leaves_its_input_and_shares_the_others() -> None:
    """The hidden states go to the host; a second input, which layers share, stays."""
    host, layer = HostCopies(CPU), nn.Linear(4, 4)
    hidden, shared = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(layer(x)) * y

    out = run_layer("offload", forward, hidden, shared, host=host)
    assert host.num_bytes == hidden.nbytes
    found = torch.autograd.grad(out.sum(), (hidden, *layer.parameters()))
    wanted = torch.autograd.grad(forward(hidden, shared).sum(), (hidden, *layer.parameters()))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_layers_leave_nothing_behind() -> None:
    """Gradients are bitwise those of `attention`, in the memory of a few layers. No memory waits
    for a copy, though the host launches a step long before the GPU has done it."""
    peaks, grads, waiting = {}, {}, {}
    meter, length = CudaMeter(torch.device("cuda", 0)), 2**13
    for policy in ("attention", "offload"):
        model = tiny_model(
            num_hidden_layers=16,
            hidden_size=1024,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=length,
        ).to("cuda", torch.bfloat16)
        it = Trained(model, length=length, rows=1, checkpoint=policy, deterministic=True)
        for _ in range(3):
            model.zero_grad(set_to_none=False)  # or gradients pile up where layers' inputs go
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            it.loss().backward()
            peaks[policy] = torch.cuda.max_memory_allocated() - before
            waiting[policy] = meter.peak() - torch.cuda.max_memory_allocated()
        grads[policy] = gradients(model)
    assert_equal(grads["offload"], grads["attention"])
    one_layer = 2 * length * 2 * 1024  # its input and attention's output
    assert peaks["attention"] - peaks["offload"] > 10 * one_layer
    assert waiting == {"attention": 0, "offload": 0}
