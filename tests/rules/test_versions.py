import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from longctx_patch.rules.versions import TESTED, warn_untested


def test_what_is_installed_here_was_tested() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested(TESTED)


@pytest.mark.parametrize(
    ("name", "found", "tested"),
    [
        ("torch", "2.10.1", False),
        ("torch", "2.11.0+cu130", True),
        ("torch", "2.13.9", True),
        ("torch", "2.14.0.dev20261101", False),
        ("torch", "3.0", False),
        ("accelerate", "1.16.0", False),
        ("peft", "0.9.0", False),
        ("transformers", "5.16.2", False),
        ("transformers", "5.17.0", True),
        ("transformers", "5.24.1", True),
        ("transformers", "5.25.0", False),
        ("trl", "1.17.0", False),
    ],
)
def test_versions_outside_are_named_once(name: str, found: str, tested: bool) -> None:
    versions = {name: version(name) for name in TESTED} | {name: found}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_untested(TESTED, versions.__getitem__)
    assert len(heard) == (0 if tested else 1)
    oldest, newest = TESTED[name]
    for each in heard:
        assert f"not tested with {name} {found} (tested: {oldest} to {newest})." in str(
            each.message
        )


def test_readme_states_them() -> None:
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    shown_as = {"accelerate": "Accelerate", "peft": "PEFT", "trl": "TRL"}
    for name in TESTED:
        shown = shown_as.get(name, name)
        oldest, newest = TESTED[name]
        assert f"{shown} {oldest}" + (f" to {newest}" if newest != oldest else "") in text
