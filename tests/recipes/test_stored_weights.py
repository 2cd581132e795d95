"""Checkpoints whose files don't hold the model's weights are refused before they are read, however
they are read, and by `longctx patch`; unless a weight is allowed by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx_patch.plugin.stored_check import check_stored
from longctx_patch.recipes import models
from tests.cli.conftest import Run, run
from tests.hf.tiny import tiny_config
from tests.recipes.conftest import loaded, settings_of

__all__ = ["run"]  # a fixture

UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Spoil = Callable[[Path], Any]


def save(folder: Path, *, shard: str = "1GB", **changes: Any) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", **changes))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load(folder: Path, *, sharded: bool = False, allow: tuple[str, ...] = ()) -> PreTrainedModel:
    asked = settings_of(folder, dtype="float32", allow_weights=list(allow))
    found: PreTrainedModel = loaded(asked, sharded=sharded)
    return found


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """A change of the tensors in the one file."""

    def spoil(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        change(found)
        save_file(found, folder / SINGLE, metadata={"format": "pt"})

    return spoil


def index(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(found)))

    return spoil


def file(content: Callable[[bytes], bytes], name: str = SINGLE) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content((folder / name).read_bytes()))


def in_first(found: dict[str, Any]) -> dict[str, Any]:
    """An index that says all tensors are in one file."""
    first = min(found["weight_map"].values())
    return found | {"weight_map": dict.fromkeys(found["weight_map"], first)}


SECOND = "model-00002-of-00003.safetensors"
BAD: dict[str, tuple[Spoil, str]] = {
    "missing": (tensors(lambda t: t.pop(UP)), f"{UP} is in none of its 1 .*--allow-weights NAME"),
    "unexpected": (
        tensors(lambda t: t.update(extra=torch.ones(2))),
        f"{SINGLE}: extra is no weight of a LlamaForCausalLM",
    ),
    "shape": (
        tensors(lambda t: t.update({NORM: torch.ones(3)})),
        rf"{SINGLE}: {NORM} has the shape \[3\], by the config {NORM} has \[64\]",
    ),
    "cut": (file(lambda b: b[:-9]), f"{SINGLE} is not a whole safetensors file .*Download it"),
    "no header": (
        file(lambda b: b" \0\0\0\0\0\0\0" + b"?" * 99),
        f"{SINGLE} is not a whole .* invalid JSON in header",
    ),
    "pointer": (
        file(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n"),
        f"{SINGLE} is not a whole .*`git lfs pull`",
    ),
    "no file": (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is not there, and .*{INDEX}"),
    "index of less": (index(in_first), "is in none of its 1 safetensors"),
    "index a list": (index(lambda _: []), f"{INDEX}: not an index of safetensors files"),
    "index of others": (
        index(lambda found: found | {"weight_map": found["weight_map"] | {UP: "../x.safetensors"}}),
        f"{INDEX} names '../x.safetensors': files of a checkpoint lie in its own folder",
    ),
    "index cut": (file(lambda b: b[:-9], INDEX), f"{INDEX}: not an index of safetensors files"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_hold_the_model(run: Run, tmp_path: Path, name: str) -> None:
    spoil, message = BAD[name]
    is_sharded = any(word in name for word in ("index", "second", "no file"))
    folder = save(tmp_path / "model", shard="100KB" if is_sharded else "1GB")
    spoil(folder)
    for sharded in (False, True):
        with pytest.raises(ValueError, match=message):
            load(folder, sharded=sharded)
    words = ["--seq-len", 16, "--gpus", 2, "--tokenizer", "bytes", "--out", tmp_path / "run"]
    said = run("patch", folder, *words)
    assert said.exit_code == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(" ".join(said.stderr.split()))
    assert not (tmp_path / "run").exists()


def test_what_transformers_does_not_mind(tmp_path: Path) -> None:
    """A head that is tied, and buffers that older versions wrote."""
    folder = save(tmp_path / "tied", tie_word_embeddings=True)
    assert HEAD not in load_file(folder / SINGLE)
    tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(
        folder
    )
    assert load(folder).lm_head.weight is not None
    load(folder, sharded=True)


def test_weights_that_are_allowed_by_name(tmp_path: Path) -> None:
    """What is missing is random, the same wherever the seed is; the rest is what is stored."""
    folder = save(tmp_path / "model")
    whole = load_file(folder / SINGLE)
    tensors(lambda t: (t.pop(UP), t.update(extra=torch.ones(2))))(folder)
    for allow, still in (((UP,), "extra"), (("extra",), UP), (("*.down_proj.weight",), UP)):
        with pytest.raises(ValueError, match=still):
            load(folder, allow=allow)
    found = []
    for sharded in (False, True):  # a missing one is drawn where all is read
        torch.manual_seed(1)
        model = load(folder, sharded=sharded, allow=("*.up_proj.weight", "extra"))
        found.append(model.state_dict())
    for name, weight in whole.items():
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[0][name], weight) is (name != UP)
    extra = save(tmp_path / "extra")
    tensors(lambda t: t.update(extra=torch.ones(2)))(extra)
    load(extra, sharded=True, allow=("extra",))


def test_pickled_weights_are_looked_at_once_they_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    stored = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    torch.save({name: stored[name] for name in stored if name != UP}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"{UP} is in none of its files.*--allow-weights NAME"):
        load(folder)
    torch.save(stored | {"extra": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="extra is left over"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="its weights can't be read"):
        load(folder)


def test_the_check_changes_nothing(tmp_path: Path) -> None:
    """Neither the config nor the random numbers of what is drawn after it, such as an adapter."""
    folder = save(tmp_path / "model")
    config = models.load_model_config(str(folder))
    before, state = config.to_dict(), torch.get_rng_state()
    check_stored(str(folder), config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    shutil.rmtree(folder)
