"""Importing costs nothing and needs nothing."""

import subprocess
import sys
import time

import longctx_patch

WITHOUT_OPTIONAL = """
import sys
for name in ("transformers", "accelerate", "peft", "click", "datasets", "flash_attn"):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
import longctx_patch as lp
from longctx_patch.sequence.layout import zigzag
config = lp.LongContextConfig()
out, lse = lp.attention(*torch.randn(3, 1, 16, 4, 8), group=lp.make_sequence_group(config))
batch = lp.SequenceShardCollator(config, group_rank=0, pad_token_id=0)([{"input_ids": [1, 2]}])
print(out.shape, sorted(batch))
"""


def seconds(code: str) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - started


def test_takes_no_longer_than_transformers() -> None:
    ours = min(seconds("import longctx_patch") for _ in range(2))
    theirs = min(seconds("import transformers") for _ in range(2))
    assert ours <= theirs


def test_works_with_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONAL], check=True, capture_output=True, text=True
    )
    assert "torch.Size([1, 16, 4, 8])" in done.stdout


def test_every_public_name_loads() -> None:
    assert sorted(longctx_patch.__all__) == longctx_patch.__all__
    for name in longctx_patch.__all__:
        assert getattr(longctx_patch, name).__name__ == name
        assert name in dir(longctx_patch)
