"""What a run folder's table says of models: positions that some of their layers don't see, and the
packages that recurrent layers need."""

from pathlib import Path

import pytest

from longctx_patch.cli.decision_table import _kernel_rows
from longctx_patch.families.recurrent_layers import kernel_packages
from longctx_patch.hf.model import transformers_api
from longctx_patch.hf.model.sequence_kernels import KERNELS, functions_of
from tests.cli.conftest import Run
from tests.hf.call.test_mixers import CHAINED
from tests.hf.tiny import SUPPORTED, featured_model

NONE = "the model's attention sees no positions"
SAID = {
    "nemotron_h": NONE,
    "kimi_linear": NONE,
    "beam": "as published (no positions and default), long enough",
    "gemma3_text": "as published (linear and default), long enough",
}


@pytest.mark.parametrize(
    ("family", "said"), [(name, said) for name, said in SAID.items() if name in SUPPORTED]
)
def test_models_with_and_without_positions(
    run: Run, tmp_path: Path, text_file: Path, family: str, said: str
) -> None:
    featured_model(family, vocab_size=260).config.save_pretrained(tmp_path / "model")
    place = tmp_path / "model" / "config.json"
    words = ("--seq-len", 256, "--gpus", 2, "--cpu", "--full", "--data", text_file)
    result = run("patch", place, *words, "--tokenizer", "bytes", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.output.splitlines() if line.strip().startswith("rope")]
    assert row.endswith(said)


@pytest.mark.parametrize("family", CHAINED)
def test_the_packages_are_those_whose_kernels_the_layers_call(family: str) -> None:
    model = featured_model(family)
    called = {
        KERNELS[name].distribution
        for mixer in transformers_api.recurrent_modules(model)
        for name in functions_of(mixer)
    }
    assert set(kernel_packages(model.config)) == called
    ((what, value, why),) = _kernel_rows(model.config)
    assert (what, value) == ("recurrent kernels", ", ".join(sorted(called)))
    words = " ".join(sorted(called)).replace(
        "flash-linear-attention", "'flash-linear-attention>=0.6' tilelang"
    )
    assert f"pip install {words}, or add --torch-recurrence" in why


def test_attention_needs_no_packages_of_recurrent_layers() -> None:
    assert _kernel_rows(featured_model("llama").config) == []
