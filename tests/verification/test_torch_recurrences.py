"""Models are verified on the CPU where packages of kernels are installed, which need a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx_patch import LongContextConfig, verify_on_virtual_ranks
from longctx_patch.hf.model.sequence_kernels import functions_of
from longctx_patch.hf.model.transformers_api import (
    SEQUENCE_FUNCTIONS,
    code_of,
    recurrent_modules,
)
from tests.hf.call.test_mixer_documents import install
from tests.hf.float64 import padded_rows
from tests.hf.kernel_packages import packages, write_package
from tests.hf.tiny import featured_config, featured_model

WORDS = "Pointer argument cannot be accessed from Triton (cpu tensor?)"


def needs_gpu(*args: Any, **options: Any) -> Any:
    raise ValueError(WORDS)


def namespaces(model: Any) -> list[dict[str, Any]]:
    return [code_of(type(mixer)).__globals__ for mixer in recurrent_modules(model)]


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "kimi_linear", "lfm2"])
def test_virtual_ranks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have their kernels back afterwards."""
    model = featured_model(family)
    for namespace in namespaces(model):
        for name in SEQUENCE_FUNCTIONS & namespace.keys():
            monkeypatch.setitem(namespace, name, install(namespace[name], needs_gpu))
    before = [functions_of(mixer) for mixer in recurrent_modules(model)]
    found = verify_on_virtual_ranks(model, LongContextConfig(ring_degree=2), padded_rows())
    assert found.ok, str(found)
    assert [functions_of(mixer) for mixer in recurrent_modules(model)] == before
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        model(**padded_rows())


def test_processes(tmp_path: Path) -> None:
    for package in packages():
        write_package(tmp_path, package, f"raise ValueError({WORDS!r})")
    path = tmp_path / "config.json"
    featured_config("qwen3_5_text").to_json_file(path)
    words = ["verify", str(path), "--nproc", "2", "--ring", "2", "--layout", "zigzag", "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", "from longctx_patch.cli.main import main; main()", *words],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["ok"] is True
