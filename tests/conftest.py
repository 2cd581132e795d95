"""Hypothesis tries the same examples in each run, so only a change of code changes a result.

To search further: `pytest --hypothesis-profile=default tests/sequence`.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from longctx_patch.memory.allocator import let_segments_grow

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Read when huggingface_hub is imported, here and in every process that a test starts: nothing is
# looked up, and no lookup is tried again until it has failed for minutes.
os.environ["HF_HUB_OFFLINE"] = "1"

if torch.cuda.is_available():
    let_segments_grow()  # as `make_accelerator` does

# A shell that starts the tests in the background, or nohup, has these ignored, here and in every
# process that a test starts.
for inherited, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(inherited) is signal.SIG_IGN:
        signal.signal(inherited, default)


LONGEST = "tests/trl/test_trainers", "tests/trainer/test_exactness", "tests/faults/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests run first: no worker waits for another's long one at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(autouse=True, scope="module")
def leaves_what_is_imported_to_the_end() -> None:
    """Modules live to the end, so garbage collection need not visit their million objects."""
    gc.freeze()


@pytest.fixture(autouse=True)
def forgets_accelerate() -> Iterator[None]:
    """A Trainer's arguments make states of Accelerate in this process, and set its variables: the
    next test finds neither."""
    before = dict(os.environ)
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def aot_eager() -> Iterator[None]:
    """torch.compile traces and differentiates but generates no code, which would take minutes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_stance("default", force_backend="aot_eager")
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
