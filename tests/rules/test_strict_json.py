"""JSON is read as its standard says, and what is wrong is named with its place."""

import json

import pytest

from longctx_patch.rules import strict_json


def test_what_is_json_is_read_as_python_reads_it() -> None:
    value = {"a": [1, -2.5e3, None, True, {"b": "ä\U0001f600\0"}], "": {}, "n": "NaN"}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert strict_json.loads(text) == strict_json.loads("\ufeff" + text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the field 'c' is given twice"),
        ('{"a": [{"b": 0}, {"b": NaN}]}', r"a\[1\]\.b is NaN, which is no number of JSON"),
        ("-Infinity", "the value is -Infinity"),
        ('{"m": [{"content": "x\\ud83d"}]}', r"m\[0\]\.content has half of a pair of surrogates"),
        ('"\\udc00\\ud800"', "the value has half of a pair"),
        ('{"a": {"\\ud800": 1}}', "a name in a has half of a pair"),
        ("[" * 100_000, "too many to read"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ("", "Expecting value"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strict_json.loads(text)
