"""The state of torch's random number generators, to draw the same numbers twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of the CPU's generator and the device's. Reading them waits for no kernel."""

    device: torch.device
    of_cpu: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        own = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(device, torch.get_rng_state(), own and own.get_rng_state(device))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws within the context begin with this state; later draws are unaffected by them."""
        before = RandomState.now(self.device)
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_rng_state(self.of_cpu)
        if self.of_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)
