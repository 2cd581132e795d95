"""Versions are compared with this package's own metadata."""

from dataclasses import replace

from longctx_patch.diagnosis.packages import (
    Installed,
    check_extras,
    check_packages,
    check_python,
    installed,
)

WANTED = ("torch>=2.11", "transformers<6,>=5.17", "accelerate>=1.15", "peft", "click")
EXTRAS = ('trl>=1.16; extra == "trl"', 'fa[cu13]==4.0.0b36; extra == "fa4"', 'ruff; extra == "dev"')
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0"}
GOOD = Installed(
    "3.12.1", ">=3.11", WANTED + EXTRAS, VERSIONS | {"peft": "0.21.2", "click": "8", "trl": "1.16"}
)


def test_this_environment_is_as_setup_py_wants_it() -> None:
    found = installed()
    assert found is not None
    assert {"torch", "transformers", "accelerate", "peft"} <= set(found.of_numbers)
    for check in (check_python(found), check_packages(found), check_extras(found)):
        assert (check.state, check.fix) == ("ok", "")


def test_good_versions() -> None:
    check = check_packages(GOOD)
    assert check.found == (
        "torch 2.13.0+cpu, transformers 5.24.0, accelerate 1.15.0, peft 0.21.2 and 1 others"
    )
    assert check_extras(GOOD).found == "trl 1.16; extras without their packages: fa4"


def test_missing_and_old_packages_are_installed_by_one_command() -> None:
    versions = VERSIONS | {"transformers": "5.16.9", "click": "8"}
    check = check_packages(replace(GOOD, versions=versions))
    assert check.state == "failed"
    assert check.found == "transformers 5.16.9 (<6,>=5.17 is supported), peft is not installed"
    assert check.fix == 'pip install "transformers<6,>=5.17" "peft"'


def test_a_version_that_is_too_new() -> None:
    check = check_packages(replace(GOOD, versions={**GOOD.versions, "transformers": "6.0.0"}))
    assert (check.state, check.fix) == ("failed", 'pip install "transformers<6,>=5.17"')


def test_a_nightly_torch_counts_as_its_version() -> None:
    nightly = {**GOOD.versions, "torch": "2.15.0.dev20261101+cu130"}
    assert check_packages(replace(GOOD, versions=nightly)).state == "ok"


def test_an_old_extra_is_a_warning_with_its_extra_kept() -> None:
    check = check_extras(replace(GOOD, versions={**GOOD.versions, "trl": "1.2", "fa": "4.0.0b1"}))
    assert check.state == "warning"
    assert check.fix == 'pip install "fa[cu13]==4.0.0b36" "trl>=1.16"'


def test_an_old_python() -> None:
    check = check_python(replace(GOOD, python="3.10.4"))
    assert (check.state, check.found) == ("failed", "3.10.4, >=3.11 is needed")
    assert "PYTHON=" in check.fix


def test_sources_that_are_not_installed() -> None:
    assert (check_packages(None).state, check_packages(None).fix) == (
        "failed",
        "in the clone: pip install -e .",
    )
