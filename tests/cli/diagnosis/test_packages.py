"""Versions are compared with this package's own metadata."""

from dataclasses import replace

from longctx_patch.cli.diagnosis.packages import Installed, check_packages, installed

WANTED = ("torch>=2.11", "transformers<6,>=5.17", "accelerate>=1.15", "peft", "click")
EXTRAS = ('trl>=1.16; extra == "trl"', 'fa[cu13]==4.0.0b36; extra == "fa4"', 'ruff; extra == "dev"')
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0"}
GOOD = Installed(WANTED + EXTRAS, VERSIONS | {"peft": "0.21.2", "click": "8"})


def test_this_environment_is_as_setup_py_wants_it() -> None:
    found = installed()
    assert found is not None
    assert {"torch", "transformers", "accelerate", "peft"} <= set(found.of_numbers)
    assert (check_packages(found).state, check_packages(found).fix) == ("ok", "")


def test_missing_and_old_packages_are_installed_by_one_command() -> None:
    versions = VERSIONS | {"transformers": "5.16.9", "click": "8"}
    check = check_packages(replace(GOOD, versions=versions))
    assert check.state == "failed"
    assert check.found == "transformers 5.16.9 (<6,>=5.17 is supported), peft is not installed"
    assert check.fix == 'pip install "transformers<6,>=5.17" "peft"'


def test_a_nightly_torch_counts_as_its_version() -> None:
    nightly = {**GOOD.versions, "torch": "2.15.0.dev20261101+cu130"}
    assert check_packages(replace(GOOD, versions=nightly)).state == "ok"


def test_sources_that_are_not_installed() -> None:
    assert (check_packages(None).state, check_packages(None).fix) == (
        "failed",
        "in the clone: pip install -e .",
    )


def test_good_versions() -> None:
    check = check_packages(GOOD)
    assert check.found == (
        "torch 2.13.0+cpu, transformers 5.24.0, accelerate 1.15.0, peft 0.21.2 and 1 others"
    )


def test_a_version_that_is_too_new() -> None:
    check = check_packages(replace(GOOD, versions={**GOOD.versions, "transformers": "6.0.0"}))
    assert (check.state, check.fix) == ("failed", 'pip install "transformers<6,>=5.17"')
