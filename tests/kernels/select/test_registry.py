"""Which kernel is chosen, and what the error says where none can be."""

import pytest
import torch

from longctx_patch.kernels import KernelRequest, available, choose_kernel

CPU = KernelRequest("cpu", torch.float32, 8)
GPU = KernelRequest("cuda", torch.float32, 64)


def test_auto_takes_the_fastest_that_can() -> None:
    assert choose_kernel("auto", CPU).name == "torch_cpu"
    assert choose_kernel("auto", CPU._replace(tiles=True)).name == "torch_cpu"
    assert choose_kernel("auto", CPU._replace(softcap=True)).name == "torch_eager"
    assert choose_kernel("auto", CPU._replace(pieces=True)).name == "torch_cpu"


def test_pieces_prefer_packed_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    request = KernelRequest("cuda", torch.bfloat16, 128)
    choose_kernel.cache_clear()
    assert choose_kernel("auto", request).name == "cudnn"
    assert choose_kernel("auto", request._replace(pieces=True)).name == "torch_flash"
    assert choose_kernel("auto", request._replace(head_dim=256)).name == "cudnn"
    assert choose_kernel("auto", request._replace(head_dim=264)).name == "torch_eager"


@pytest.mark.parametrize("feature", ["softcap", "tiles"])
def test_a_feature_is_never_lost(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen kernel has the feature, and kernels that lack it refuse the request."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        asked = {"softcap": feature == "softcap", "tiles": feature == "tiles"}
        request = KernelRequest(device, dtype, 64, **asked)
        choose_kernel.cache_clear()
        assert getattr(choose_kernel("auto", request).traits, feature)
        for kernel in available().values():
            if not getattr(kernel.traits, feature):
                assert kernel.refuses(request) is not None


def test_the_reference_is_taken_by_name_only() -> None:
    assert choose_kernel("reference", CPU).name == "reference"
    assert choose_kernel("torch_eager", GPU).name == "torch_eager"


def test_errors_say_what_is_asked_and_who_has_it() -> None:
    with pytest.raises(ValueError, match="cudnn: needs device cuda, tensors are on cpu"):
        choose_kernel("cudnn", CPU)
    with pytest.raises(ValueError, match="kernel='magic': choose one of auto, flash_attn_4"):
        choose_kernel("magic", CPU)
    with pytest.raises(ValueError, match="Did you mean 'torch_flash'"):
        choose_kernel("torchflash", CPU)
    with pytest.raises(ValueError, match="takes bfloat16, float16, tensors are float32"):
        choose_kernel("torch_flash", GPU)
    with pytest.raises(ValueError, match="takes head dims up to 256 that are a multiple of 8"):
        choose_kernel("cudnn", KernelRequest("cuda", torch.bfloat16, 264))
    with pytest.raises(
        ValueError,
        match="no kernel for float32 with head dim 8, softcap of scores on cpu:\n"
        "  torch_cpu: has no softcap of scores\n"
        "Use kernel='auto', or one of torch_eager, reference",
    ):
        choose_kernel("torch_cpu", CPU._replace(softcap=True))
    with pytest.raises(ValueError, match="torch_flash: takes no tables of allowed pairs"):
        choose_kernel("torch_flash", GPU._replace(dtype=torch.bfloat16, tiles=True))
    with pytest.raises(ValueError, match="takes floats, tensors are int64"):
        choose_kernel("auto", CPU._replace(dtype=torch.int64))


def test_flex_says_why_not() -> None:
    flex = available()["flex"]
    assert flex.refuses(CPU) == "needs device cuda, tensors are on cpu"
    assert "power of two" in (flex.refuses(GPU._replace(head_dim=96)) or "")
