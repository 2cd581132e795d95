"""Whoever copies a patched model, in whatever way, is told what to do instead."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from longctx_patch import LongContextConfig, patch
from tests.hf.tiny import tiny_model


def spawn(given: Any) -> None:
    """A process that is not forked gets its arguments by pickle."""
    multiprocessing.get_context("spawn").Process(target=print, args=(given,)).start()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda given: torch.save(given, io.BytesIO()),
    "spawn": spawn,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("wrap", [None, nn.Sequential, "peft"])
def test_a_patched_model_is_not_copied(how: str, wrap: Any) -> None:
    model: Any = tiny_model()
    whole = (
        model if wrap != "peft" else get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    )
    handle = patch(whole, LongContextConfig())
    whole = nn.Sequential(model) if wrap is nn.Sequential else whole
    message = r"can't be copied or pickled: .* before patch\(\) .*model.state_dict\(\)"
    for given in (whole, handle):
        with pytest.raises(ValueError, match=message):
            COPIES[how](given)
    torch.save(whole.state_dict(), io.BytesIO())
    handle.unpatch()
    if how != "spawn":
        COPIES[how](whole)
