"""What running each family gave, as `benchmarks/survey_families.py` wrote it into survey.json.

Each row is a tiny model on two virtual ranks, patched whether it is supported or not, against its
stock self. This needs neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

Verdict = Mapping[str, Any]
"""Relative errors `float64`, `float32` and the stock model's own `stock float32`, the worst of loss
and gradients; or how it `differs`, or `fails`."""


@cache
def surveyed_version() -> str:
    """The version of transformers that the survey ran."""
    return str(_file()["transformers"])


@cache
def survey() -> Mapping[str, Mapping[str, Verdict]]:
    """Model type -> way to cut rows (or `stock`, if that fails by itself) -> verdict."""
    return MappingProxyType(_file()["families"])


def errors(model_type: str) -> tuple[float, float] | None:
    """The worst error in float64 and in float32 of all ways, if all are equal to the stock model in
    float64; else None."""
    verdicts = survey().get(model_type, {}).values()
    if not verdicts or not all("float64" in verdict for verdict in verdicts):
        return None
    return max(v["float64"] for v in verdicts), max(v["float32"] for v in verdicts)


def found(model_type: str) -> str:
    """What running the family gave, in words."""
    verdicts = survey().get(model_type)
    if verdicts is None:
        return "not run"
    if equal := errors(model_type):
        return f"equal to the stock model (float64 {equal[0]:.0e}, float32 {equal[1]:.0e})"
    way, verdict = next((way, v) for way, v in verdicts.items() if "float64" not in v)
    if "differs" in verdict:
        loss, gradients = verdict["differs"]["loss"], verdict["differs"]["gradients"]
        return f"differs by {way}: loss by {loss:.0e}, gradients by {gradients:.0e}"
    what = "not run, as the tiny stock model" if way == "stock" else f"by {way} it"
    return f"{what} fails: {verdict['fails']}"


def _file() -> dict[str, Any]:
    text = files(__package__).joinpath("survey.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
