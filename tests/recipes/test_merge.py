"""Merging file by file gives peft's own merged model, in files that others load."""

import ctypes
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from longctx_patch.cli.merge_command import render
from longctx_patch.recipes.merge import find_adapter, merge
from longctx_patch.recipes.models import byte_tokenizer
from tests.hf.tiny import SUPPORTED, VOCABULARY, tiny_config
from tests.launching import start_forked
from tests.recipes.conftest import Start

IDS = torch.arange(120)[None] % VOCABULARY
ALL: dict[str, Any] = {"target_modules": "all-linear"}
V_PROJ: dict[str, Any] = {"target_modules": ["v_proj"]}
PATTERNS = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"q_proj": 5}}
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("llama", ALL | {"use_rslora": True}),
    "patterns": ("qwen3", {"target_modules": ["q_proj", "down_proj"], **PATTERNS}),
    "dora": ("llama", ALL | {"use_dora": True}),
    "saved": ("llama", V_PROJ | {"modules_to_save": ["lm_head", "norm"]}),
    "tokens": ("llama", V_PROJ | {"trainable_token_indices": [3, 5]}),
    "whole": ("llama", V_PROJ | {"modules_to_save": ["embed_tokens"]}),
    "embeddings": ("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "biases": ("qwen2", V_PROJ | {"bias": "all"}),
    "lora_bias": ("qwen2", V_PROJ | {"lora_bias": True}),
    "beside_experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    "experts": ("qwen3_moe", ALL),  # with the router
    "stacked_experts": ("qwen3_5_moe_text", ALL | {"target_parameters": STACKED}),
    "parameters": ("llama", V_PROJ | {"target_parameters": ["mlp.up_proj.weight"]}),
}


def make_base(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A base of several files, with tokenizer."""
    torch.manual_seed(0)
    overrides = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | overrides
    if "moe" in family:
        overrides |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # biases too
    model.save_pretrained(folder, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base: Path, config: Any = None, **options: Any) -> Path:
    """An adapter with numbers everywhere, where peft would begin with zeros."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = config or LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=7, **options)
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    base = make_base(tmp_path / "base", family)
    adapter = make_adapter(tmp_path / "adapter", base, **options)
    assert merge(adapter, tmp_path / "out").num_changed > 0
    expected = merged_by_peft(base, adapter)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs, before = found.state_dict(), AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(theirs[name], value), name
    assert any(not torch.equal(theirs[name], before[name]) for name in theirs)
    assert torch.equal(*(model(IDS, use_cache=False).logits for model in (found, expected)))
    # The names in the files are the base's, which are those that vLLM knows.
    old, new = tensors_of(base), tensors_of(tmp_path / "out")
    assert {k: (v.shape, v.dtype) for k, v in old.items()} == {
        k: (v.shape, v.dtype) for k, v in new.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [3, 5]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_tied_embeddings_change_in_both(options: dict[str, Any], tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(tmp_path / "adapter", base, **V_PROJ, **options)
    merge(adapter, tmp_path / "out")
    unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(found(IDS).logits, unmerged(IDS).logits, rtol=1e-5, atol=1e-5)


def test_sums_in_bfloat16_are_made_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", dtype=torch.bfloat16)
    adapter = make_adapter(tmp_path / "adapter", base, **ALL)
    merge(adapter, tmp_path / "out")
    merge(adapter, tmp_path / "float32", dtype=torch.float32)
    exact = merged_by_peft(base, adapter, dtype=torch.float32).state_dict()
    for name, value in tensors_of(tmp_path / "float32").items():
        assert torch.equal(value, exact[name])
    for name, value in tensors_of(tmp_path / "out").items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, exact[name].to(torch.bfloat16))
    dtypes = {
        n: json.loads((tmp_path / n / "config.json").read_text())["dtype"]
        for n in ("out", "float32")
    }
    assert dtypes == {"out": "bfloat16", "float32": "float32"}


def test_a_run_keeps_its_rope_length_tokenizer_and_chat_template(tmp_path: Path) -> None:
    """What vLLM reads: RoPE under its new and old names, generation's config, the template."""
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "training/final", base, **V_PROJ)
    config = AutoConfig.from_pretrained(base)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config.rope_parameters = {"rope_theta": 10000.0, **yarn}
    config.max_position_embeddings = 2048
    config.save_pretrained(adapter)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)

    merge(find_adapter(tmp_path), tmp_path / "out")
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert content["rope_parameters"] == config.rope_parameters
    assert content["rope_scaling"] == yarn
    assert (content["rope_theta"], content["max_position_embeddings"]) == (10000.0, 2048)
    assert content["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoConfig.from_pretrained(tmp_path / "out")
    assert loaded.rope_parameters == config.rope_parameters
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"generation_config.json", "model.safetensors.index.json"} <= files
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = tensors_of(tmp_path / "out")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    expected = merged_by_peft(base, adapter, config=config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_another_base_of_the_same_shapes_is_refused_unless_it_is_named(
    start: Start, tmp_path: Path
) -> None:
    """A base that was trained on at its place: both the final adapter and a checkpoint's know."""
    base = make_base(tmp_path / "base", vocab_size=258)
    run = start(model=base, max_steps=1, save_every=1)
    adapters = (run / "final", run / "checkpoint-1")
    whole = [merge(each, tmp_path / f"out{n}").num_changed for n, each in enumerate(adapters)]
    assert whole[0] == whole[1] > 0
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    other.save_pretrained(base, max_shard_size="60KB")
    for adapter in adapters:
        with pytest.raises(
            ValueError, match=r"trained over: \S+ is .*, sample \w+, and was .*--base"
        ):
            merge(adapter, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert merge(adapters[0], tmp_path / "named", base=str(base)).num_changed == whole[0]


def test_an_adapter_over_4_bits_goes_into_the_weights_before_rounding(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base, **V_PROJ)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (adapter / "config.json").write_text(json.dumps(config))
    merged = merge(adapter, tmp_path / "out")
    assert merged.is_from_4bit
    assert "that were not: losses differ" in render(merged)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    expected = merged_by_peft(base, adapter).state_dict()
    for name, value in tensors_of(tmp_path / "out").items():
        assert torch.equal(value, expected[name])


def without(path: Path, end: str) -> None:
    """Take the tensors whose names end so out of a file."""
    kept = {name: value for name, value in load_file(path).items() if not name.endswith(end)}
    assert len(kept) < len(load_file(path))
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("end", ["layers.1.mlp.experts.lora_B.weight", "q_proj.lora_A.weight"])
def test_an_adapter_that_lacks_a_factor_is_refused(end: str, tmp_path: Path) -> None:
    """peft would fill it with what lies in memory, or merge nothing."""
    base = make_base(tmp_path / "base", "qwen3_moe")
    adapter = make_adapter(tmp_path / "adapter", base, **ALL)
    without(adapter / "adapter_model.safetensors", end)
    with pytest.raises(ValueError, match=r"does not fit .*missing adapter keys .*--base"):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_with_nan_is_refused_and_what_overflows_leaves_nothing(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    path = make_adapter(tmp_path / "adapter", base, **V_PROJ) / "adapter_model.safetensors"
    tensors = load_file(path)
    last = max(tensors)
    for value, message in ((torch.nan, "not finite"), (1e6, "beyond float16's range")):
        save_file(tensors | {last: torch.full_like(tensors[last], value)}, path)
        with pytest.raises(ValueError, match=message):
            merge(path.parent, tmp_path / "out", dtype=torch.float16)
        assert not any((tmp_path / "out").glob("*"))


def test_an_adapter_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    path = make_adapter(tmp_path / "adapter", base, **V_PROJ) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"no whole file of weights .* Copy it again"):
        merge(path.parent, tmp_path / "out")


def test_a_base_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3_moe")
    adapter = make_adapter(tmp_path / "adapter", base, **ALL)
    whole = tensors_of(base)
    del whole["model.layers.1.mlp.experts.3.down_proj.weight"]
    for path in base.glob("*.safetensors*"):
        path.unlink()
    save_file(whole, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj\.weight makes .*\[3, 64, 32\], by the base's"):
        merge(adapter, tmp_path / "out", base=str(base))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("lara_mini", "all-linear", "converted by .*Split.*merge_and_unload"),
        ("laguna", "all-linear", "Its file has them: peft can't load them"),
    ],
)
def test_what_peft_or_transformers_moves_in_other_ways_is_refused(
    family: str, targets: str, message: str, tmp_path: Path
) -> None:
    if family not in SUPPORTED:
        pytest.skip(f"the installed transformers has no {family}")
    base = make_base(tmp_path / "base", family)
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=targets)
    with pytest.raises(ValueError, match=message):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tied_embeddings_ask_for_no_conversion_of_other_weights(tmp_path: Path) -> None:
    if "lara_mini" not in SUPPORTED:
        pytest.skip("the installed transformers has no lara_mini")
    base = make_base(tmp_path / "base", "lara_mini", tie_word_embeddings=True)
    options = {"target_modules": ["o_proj"], "trainable_token_indices": [3, 5]}
    adapter = make_adapter(tmp_path / "adapter", base, **options)
    merge(adapter, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    wanted = merged_by_peft(base, adapter).state_dict()
    assert torch.equal(found["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"])


def test_a_failure_at_the_end_leaves_nothing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base, **V_PROJ)

    def fails(*_: Any) -> None:
        assert (tmp_path / "out/model.safetensors.index.json").is_file()
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("longctx_patch.recipes.merge.write_config", fails)
        with pytest.raises(OSError, match="no space"):
            merge(adapter, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    assert merge(adapter, tmp_path / "out").num_changed == 2


def test_weights_of_one_number_stay(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "apertus")
    merge(make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"]), tmp_path / "out")
    old, new = tensors_of(base), tensors_of(tmp_path / "out")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert any(value.numel() == 1 for value in old.values())
    assert {name.rsplit(".", 2)[-2] for name in changed} == {"q_proj"}


def test_what_the_adapter_leaves_alone_may_be_of_any_kind(tmp_path: Path) -> None:
    """A tensor of a dtype that is not read by rows, and weights that transformers splits."""
    base = make_base(tmp_path / "base", "kimi_linear")
    path = next(base.glob("*.safetensors"))
    save_file(load_file(path) | {"more": torch.zeros(3, dtype=torch.int16)}, path, {"format": "pt"})
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = path.name
    index.write_text(json.dumps(content))
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=[], target_parameters=STACKED)
    merge(adapter, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in merged_by_peft(base, adapter).state_dict().items():
        assert torch.equal(found[name], value), name


def test_factors_of_single_experts_have_one_scale(tmp_path: Path) -> None:
    """As transformers 4 had them; peft would take the scale of what it puts them into."""
    base = make_base(tmp_path / "base", "qwen3_moe")
    folder = make_adapter(tmp_path / "adapter", base, **V_PROJ, use_rslora=True)
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
    save_file(load_file(path) | {name: torch.zeros(4, 64)}, path)
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj.* with use_rslora: .*another scale"):
        merge(folder, tmp_path / "out")


def test_what_is_not_covered_is_refused_by_name(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    path = make_adapter(tmp_path / "adapter", base, **V_PROJ) / "adapter_config.json"
    usual = json.loads(path.read_text())
    for options, message in (
        ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa': merging does not cover"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication="),
    ):
        path.write_text(json.dumps(usual | options))
        with pytest.raises(ValueError, match=message):
            merge(path.parent, tmp_path / "out")
    other = IA3Config(feedforward_modules=[], task_type="CAUSAL_LM", **V_PROJ)
    make_adapter(tmp_path / "other", base, config=other)
    with pytest.raises(ValueError, match=r"holds a .*IA3 adapter"):
        merge(tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changed", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_modules_is_refused(changed: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    options = V_PROJ | {"modules_to_save": [changed]}
    with pytest.raises(ValueError, match=rf"changes .*{changed}.* share their weights"):
        merge(make_adapter(tmp_path / "adapter", base, **options), tmp_path / "out")


def test_bases_without_weights_to_merge_into_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base, **V_PROJ)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="there is nothing to merge"):
        find_adapter(base)
    with pytest.raises(ValueError, match="no adapter in it"):
        find_adapter(tmp_path)
    with pytest.raises(ValueError, match=r"bare config.*lines that load both"):
        merge(adapter, out, base=str(base / "config.json"))
    other = make_base(tmp_path / "other", hidden_size=32)
    with pytest.raises(ValueError, match=r"does not fit its base model.*--base"):
        merge(adapter, out, base=str(other))
    config = json.loads((base / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "fp8"}}
    (base / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match="quantised weights"):
        merge(adapter, out)
    (base / "config.json").write_text(json.dumps(config))
    index = base / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["lm_head.weight"] = str(tmp_path / "x.safetensors")  # would be written
    index.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="files of a checkpoint lie in its own folder"):
        merge(adapter, out)
    for path in base.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no safetensors"):
        merge(adapter, out)
    assert not out.exists()
    with pytest.raises(ValueError, match="holds files"):
        merge(adapter, base)


def anonymous() -> int:
    """Bytes that this process holds: a machine short of memory drops other pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if "RssAnon" in line).split()[1]) * 1024


def merge_measured(adapter: Path, folder: Path) -> None:
    """Write the most that is held during a merge."""
    # What is freed goes back to the system at once, so that only what is held is counted.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    torch.set_num_threads(1)
    merge(adapter, folder / "once")  # libraries load what they need
    before, peaks, ended = anonymous(), list[int](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            peaks.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    merge(adapter, folder / "twice")
    ended.set()
    watcher.join()
    assert len(peaks) > 20, len(peaks)
    (folder / "peak").write_text(str(max(peaks) - before))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_stays_below_two_files_and_a_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config("llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="25MB")
    make_adapter(tmp_path / "adapter", tmp_path / "base", **ALL)
    sizes = [path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors")]
    said = tmp_path / "said"
    process = start_forked(merge_measured, said, tmp_path / "adapter", tmp_path)
    process.join(120)
    assert process.exitcode == 0, said.read_text()
    bound = 2 * max(sizes) + 1024 * 2048 * 4
    assert int((tmp_path / "peak").read_text()) < bound < 0.6 * sum(sizes)
