"""Importing the package loads no library and needs none of the optional ones."""

import runpy
import subprocess
import sys

import pytest

import longctx_patch

WITHOUT_OPTIONAL = """
import sys
for name in (
    *("transformers", "accelerate", "peft", "click", "datasets", "triton", "packaging"),
    *("flash_attn", "flash_attn_3", "flash_attn_interface"),
):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
import longctx_patch as lp
from longctx_patch.sequence.layout import zigzag
config = lp.LongContextConfig()
out, lse = lp.attention(*torch.randn(3, 1, 16, 4, 8), group=lp.make_sequence_group(config))
batch = lp.SequenceShardCollator(config, group_rank=0, pad_token_id=0)([{"input_ids": [1, 2]}])
print(out.shape, sorted(batch))
"""


def modules_after(code: str) -> set[str]:
    """Top-level names of the modules that a new process has loaded after running `code`."""
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    return set(output_of(code).split())


def output_of(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_loads_nothing_else() -> None:
    loaded = modules_after("import longctx_patch; longctx_patch.__version__; dir(longctx_patch)")
    assert "longctx_patch" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "accelerate", "peft", "click"}


def test_the_config_needs_no_torch_and_the_operator_no_transformers() -> None:
    assert "torch" not in modules_after("from longctx_patch import LongContextConfig")
    loaded = modules_after("from longctx_patch import attention, masks, SequenceShardCollator")
    assert "torch" in loaded
    assert not loaded & {"transformers", "accelerate", "peft", "triton", "flash_attn"}


def test_windows_is_told_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="WSL 2"):
        runpy.run_path(str(longctx_patch.__file__))


def test_works_with_torch_alone() -> None:
    assert "torch.Size([1, 16, 4, 8])" in output_of(WITHOUT_OPTIONAL)


def test_every_public_name_loads() -> None:
    for name in set(longctx_patch.__all__) - {"__version__"}:
        assert getattr(longctx_patch, name).__name__.rpartition(".")[2] == name
        assert name in dir(longctx_patch)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'pach'"):
        longctx_patch.pach  # noqa: B018
    with pytest.raises(AttributeError, match=r"'explain'. Use longctx_patch.compare"):
        longctx_patch.explain  # noqa: B018
