"""The adapters of the flash-attn packages over functions in plain torch, which are in the files
beside this one: under the packages' names and with their demands.

Parameters are the packages' too, without those that training has no use for: an argument under a
wrong name is a TypeError here as there.
"""

from dataclasses import dataclass, field
from typing import Any

from longctx_patch.kernels import Kernel
from longctx_patch.kernels.backends.flash_attn_2 import FlashAttn2Kernel
from longctx_patch.kernels.backends.flash_attn_3 import FlashAttn3Kernel
from longctx_patch.kernels.backends.flash_attn_4 import FlashAttn4Kernel
from longctx_patch.kernels.installed import Package
from tests.kernels.fake_flash_attn_2 import FlashAttn2
from tests.kernels.fake_flash_attn_4 import FlashAttn4


@dataclass(frozen=True)
class LoadedPackage(Package):
    """A package that is always there."""

    content: Any = field(default=None, compare=False)

    def problem(self) -> str | None:
        return None

    def load(self) -> Any:
        return self.content


def loaded(content: Any) -> LoadedPackage:
    return LoadedPackage("fake", "fake", "0", "nothing", content)


def fake_kernels() -> dict[str, Kernel]:
    """The adapters over these functions. For flash_attn_3, within `flash_attn_3_ops`."""
    return {
        "flash_attn_4": FlashAttn4Kernel(package=loaded(FlashAttn4())),
        "flash_attn_3": FlashAttn3Kernel(package=loaded(None)),
        "flash_attn_2": FlashAttn2Kernel(package=loaded(FlashAttn2())),
    }
