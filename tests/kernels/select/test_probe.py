"""The probe measures kernels, finds wrong ones, and remembers its results."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx_patch.kernels import Kernel, KernelRequest, Score, Segments, Traits
from longctx_patch.kernels.backends.dense import DenseKernel
from longctx_patch.kernels.base import CAUSAL_WINDOW, Domain
from longctx_patch.kernels.select import preference as preference_module
from longctx_patch.kernels.select.cache import ProbeCache, default_path
from longctx_patch.kernels.select.preference import measured_here, preferred
from longctx_patch.kernels.select.probe import (
    Measured,
    allowed_pairs,
    gpu_seconds,
    measure,
    rounded,
)

REQUEST = KernelRequest("cpu", torch.float32, 8, num_heads=4, num_kv_heads=2, num_rows=64)
GPU = KernelRequest("cuda", torch.bfloat16, 128)
PACKED = Traits(segments=True, windows=True, tiles=False, softcap=True)
PLAIN = Traits(segments=False, windows=False, tiles=False, softcap=False)
EXACT = DenseKernel("torch_eager", None)


@dataclass
class Clock:
    now_s: float = 0.0

    def time(self, run: Callable[[], object]) -> float:
        started = self.now_s
        run()
        return self.now_s - started


@dataclass
class FakeKernel:
    """A kernel that is right but for `spoil`; forward takes one second, backward two."""

    name: str
    clock: Clock
    traits: Traits = PACKED
    domain: Domain = Domain(None, (torch.float32,))  # noqa: RUF009
    spoil: Callable[[str, Tensor], Tensor] = lambda _, x: x
    seen: list[Segments] = field(default_factory=list)

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, score: Score
    ) -> tuple[Tensor, Tensor]:
        self.clock.now_s += 1
        self.seen.append(segments)
        out, lse = EXACT.forward(q, k, v, segments, score)
        return self.spoil("out", out), self.spoil("lse", lse)

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.clock.now_s += 2
        dq, dk, dv = EXACT.backward(*given)
        return self.spoil("dq", dq), self.spoil("dk", dk), self.spoil("dv", dv)


def probe(request: KernelRequest = REQUEST, **options: Any) -> Measured:
    clock = Clock()
    kernel = FakeKernel("fake", clock, **options)
    return measure([kernel], request, device="cpu", stopwatch=clock.time)["fake"]


def test_each_case_is_timed_both_ways() -> None:
    found = probe()
    assert found == Measured({"causal": (1.0, 2.0), "full": (1.0, 2.0)})
    assert found.total_s == 6
    assert allowed_pairs("full", 64) == 64 * 64
    assert allowed_pairs("causal", 64) == 64 * 65 // 2


class FakeGpu:
    """Runs work in order while the CPU goes on."""

    def __init__(self) -> None:
        self.cpu_s = self.gpu_s = 0.0

    def give(self, host_s: float, device_s: float) -> float:
        """Start work that takes these times; return when the GPU will have done it."""
        self.cpu_s += host_s
        self.gpu_s = max(self.gpu_s, self.cpu_s) + device_s
        return self.gpu_s

    def wait(self) -> None:
        self.cpu_s = max(self.cpu_s, self.gpu_s)

    def event(self, enable_timing: bool) -> "FakeEvent":
        return FakeEvent(self)


@dataclass
class FakeEvent:
    gpu: FakeGpu
    at_s: float = 0.0

    def record(self) -> None:
        self.at_s = self.gpu.give(0.0, 0.0)

    def synchronize(self) -> None:
        self.gpu.wait()

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1000 * (other.at_s - self.at_s)


@pytest.mark.parametrize("device_s", [1e-4, 1e-2])
def test_it_is_the_gpus_time_that_counts(device_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has two kernels, which the CPU starts in 2 ms, or in a second the first time."""
    gpu, calls = FakeGpu(), []
    monkeypatch.setattr("longctx_patch.kernels.select.probe.perf_counter", lambda: gpu.cpu_s)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.give(0.0, cycles / 2.2e9))

    def run() -> None:
        calls.append(1)
        gpu.give(1e-3 if len(calls) > 1 else 1.0, device_s / 2)
        gpu.give(1e-3, device_s / 2)

    assert gpu_seconds(run) == pytest.approx(device_s)
    assert gpu.cpu_s < 2


def test_many_pieces_cost_a_kernel_without_segments_many_calls() -> None:
    pieces = REQUEST._replace(pieces=True)
    assert probe(pieces).seconds == {"documents": (1.0, 2.0)}
    assert probe(pieces, traits=PLAIN).seconds["documents"][0] > 3


def test_what_is_checked_is_what_a_kernel_takes() -> None:
    clock = Clock()
    plain, packed = FakeKernel("plain", clock, PLAIN), FakeKernel("packed", clock)
    request = REQUEST._replace(pieces=True)
    measure([plain, packed], request, device="cpu", stopwatch=clock.time)
    assert any(len(segments.q) > 1 for segments in packed.seen)
    assert any(segments.rule not in (CAUSAL_WINDOW, (None, None)) for segments in packed.seen)
    assert all(len(segments.q) == 1 for segments in plain.seen)


@pytest.mark.parametrize("part", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("spoiled", [lambda x: x * 1.05, lambda x: x * float("nan")])
def test_wrong_numbers_are_found(part: str, spoiled: Callable[[Tensor], Tensor]) -> None:
    found = probe(spoil=lambda name, x: spoiled(x) if name == part else x)
    assert found.seconds == {}
    assert f"gives wrong numbers ({part} of the causal block is off by" in (found.problem or "")


def test_a_kernel_that_raises_has_a_problem_and_want_of_memory_is_none() -> None:
    def fail(error: Exception) -> Callable[[str, Tensor], Tensor]:
        def spoil(name: str, x: Tensor) -> Tensor:
            raise error

        return spoil

    found = probe(spoil=fail(RuntimeError("no kernel image")))
    assert found.problem == "failed (RuntimeError: no kernel image)"
    with pytest.raises(torch.OutOfMemoryError):
        probe(spoil=fail(torch.OutOfMemoryError("full")))


def test_measuring_draws_no_random_numbers_of_training() -> None:
    before = torch.get_rng_state()
    probe()
    assert torch.equal(before, torch.get_rng_state())


def test_few_requests_are_told_apart() -> None:
    def sizes(rows: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
        asked = GPU._replace(num_rows=rows, num_heads=heads, num_kv_heads=kv_heads)
        found = rounded(asked)
        return found.num_rows, found.num_heads, found.num_kv_heads

    assert sizes(0, 32, 8) == (1024, 32, 8)
    assert sizes(1025, 7, 1) == (2048, 7, 1)
    assert sizes(1 << 20, 128, 8) == (8192, 32, 2)
    assert sizes(4096, 64, 64) == (4096, 32, 32)
    assert sizes(4096, 48, 1) == (4096, 48, 1)


@pytest.fixture
def cache(tmp_path: Path) -> ProbeCache:
    return ProbeCache(tmp_path / "deep" / "kernels.json", "one machine")


FOUND = {
    "cudnn": Measured({"causal": (1.0, 2.0), "full": (1.0, 2.5)}),
    "torch_flash": Measured({"causal": (1.0, 2.0), "full": (0.5, 2.5)}),
    "flash_attn_4": Measured({}, "gives wrong numbers (dq of the causal block is off by 0.3)"),
}


def test_the_file_remembers_by_machine_and_request(cache: ProbeCache) -> None:
    assert cache.read(GPU) == {}
    cache.write(GPU, FOUND)
    cache.write(GPU._replace(pieces=True), {})
    other = ProbeCache(cache.path, "another machine")
    other.write(GPU, {"cudnn": FOUND["cudnn"]})
    assert cache.read(GPU) == FOUND
    assert other.read(GPU) == {"cudnn": FOUND["cudnn"]}
    for change in ({"softcap": True}, {"dtype": torch.float16}, {"head_dim": 64}, {"num_rows": 1}):
        assert cache.read(GPU._replace(**change)) == {}
    assert list(cache.path.parent.iterdir()) == [cache.path]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"one machine": 3}',
        '{"one machine": {"%s": [1]}}',
        '{"one machine": {"%s": {"cudnn": {}}}}',
        '{"one machine": {"%s": {"cudnn": {"seconds": {"full": ["x", 1]}, "problem": null}}}}',
        '{"one machine": {"%s": {"cudnn": {"seconds": {}, "problem": null}}}}',
        '{"one machine": {"%s": {"cudnn": {"seconds": {}, "problem": 7}}}}',
    ],
)
def test_what_cannot_be_understood_counts_as_empty(cache: ProbeCache, content: str) -> None:
    cache.write(GPU, FOUND)
    (label,) = json.loads(cache.path.read_text())["one machine"]
    cache.path.write_text(content.replace("%s", label))
    assert cache.read(GPU) == {}
    cache.write(GPU, FOUND)
    assert cache.read(GPU) == FOUND


def test_a_file_that_cannot_be_written_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ProbeCache(tmp_path / "file" / "kernels.json", "one machine")
    cache.write(GPU, FOUND)
    assert cache.read(GPU) == {}


def test_the_file_is_among_the_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "longctx_patch" / "kernels.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == Path.home() / ".cache" / "longctx_patch" / "kernels.json"


@dataclass
class Measuring:
    """Stands in for the measurement: returns given results and counts its calls."""

    found: dict[str, Measured]
    times: int = 0

    def __call__(self, kernels: Iterable[Kernel], request: KernelRequest) -> dict[str, Measured]:
        self.times += 1
        return {kernel.name: self.found[kernel.name] for kernel in kernels}


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine on which three kernels can run the request."""
    monkeypatch.setattr(
        preference_module,
        "measurable",
        lambda _, names: [n for n in ("flash_attn_4", "cudnn", "torch_flash") if n in names],
    )


@pytest.mark.usefixtures("three")
def test_auto_goes_by_what_was_measured_once(cache: ProbeCache) -> None:
    measuring = Measuring(FOUND)
    for _ in range(2):
        order, problems = preferred("auto", GPU, cache, measuring)
        assert problems == {"flash_attn_4": FOUND["flash_attn_4"].problem}
        assert order[:2] == ("torch_flash", "cudnn")
        assert "flash_attn_4" not in order
        assert order[2:] == ("flash_attn_3", "flash_attn_2", "flex", "torch_cpu", "torch_eager")
    assert measuring.times == 1
    assert preferred("cudnn", GPU, cache, measuring) == (("cudnn",), {})
    assert preferred("flash_attn_4", GPU, cache, measuring) == ((), problems)
    measured_here(["cudnn"], GPU, cache, measuring)
    assert measuring.times == 1
    FOUND_3 = {**FOUND, "flash_attn_3": FOUND["cudnn"]}
    measured_here(["flash_attn_3"], GPU, cache, Measuring(FOUND_3))
    assert cache.read(GPU).keys() == FOUND_3.keys()


@pytest.mark.usefixtures("three")
def test_deterministic_is_checked_and_not_ordered_by_time(cache: ProbeCache) -> None:
    measuring, request = Measuring(FOUND), GPU._replace(deterministic=True)
    assert preferred("auto", request, cache, measuring).order[1:3] == ("cudnn", "torch_flash")
    assert preferred("auto", request, cache, measuring).problems.keys() == {"flash_attn_4"}
    assert measuring.times == 1
    assert cache.read(GPU) == {}


@pytest.mark.usefixtures("three")
def test_nothing_is_measured_on_cpu(cache: ProbeCache) -> None:
    measuring = Measuring(FOUND)
    assert preferred("auto", REQUEST, cache, measuring).order[0] == "flash_attn_4"
    assert measuring.times == 0


@pytest.mark.usefixtures("three")
def test_want_of_memory_is_not_remembered(cache: ProbeCache) -> None:
    def full(kernels: Iterable[Kernel], request: KernelRequest) -> dict[str, Measured]:
        raise torch.OutOfMemoryError("full")

    assert preferred("auto", GPU, cache, full).order[0] == "flash_attn_4"
    assert cache.read(GPU) == {}
