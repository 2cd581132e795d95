"""What extend.py trains on: statements that are made twice, and documents of whole folders."""

import json
import random
import re
from itertools import product
from pathlib import Path

import extend
from launch import Budget


def _lines_of(wordings: tuple[str, ...]) -> re.Pattern[str]:
    lines = (line.replace("?", r"\?").replace(".", r"\.") for line in wordings)
    said = "|".join(lines).format(thing=r"\w+[ -]\w+", code=r"\d+")
    return re.compile(rf" (?:{said})(?=\s|$)|\n(?:{said})\n")


def test_statements_are_made_again_further_on_and_the_text_stays() -> None:
    names = ["".join(letters) for letters in product("abcdef", repeat=4)]
    text = "".join(f"line {n} of a document about {names[n % 500]}\n" for n in range(9000))
    row = 200_000
    found = extend.with_recalls(text, random.Random(0), row)
    first, again = (_lines_of(wordings) for wordings in zip(*extend.WORDINGS, strict=True))
    places, repeated = (
        {re.findall(r"\d+", match.group())[0]: match.start() for match in lines.finditer(found)}
        for lines in (first, again)
    )
    assert len(places) == len(text) // extend.RECALL_EVERY
    assert repeated.keys() == places.keys()
    added = len(found) - len(text)
    distances = [repeated[code] - place for code, place in places.items()]
    assert min(distances) > 0
    assert max(distances) < 1.05 * row + added
    # A third of them are longer than half of a row, and a sixth begin it.
    assert sum(distance > row // 2 for distance in distances) > len(places) // 3
    assert (
        sum(place < 0.02 * row for place in places.values()) > len(places) * row // len(text) // 6
    )
    assert again.sub("", first.sub("", found)) == text


def test_documents_with_statements_fill_a_row_and_little_more() -> None:
    def tokenizer(texts: list[str], **_: bool) -> dict[str, list[list[str]]]:
        return {"input_ids": [re.findall("....", text) for text in texts]}

    text = "x = 1 or" * 20_000
    parts = list(extend.pieces([text], 10_000, tokenizer))
    assert "".join(part for part, _ in parts) == text
    # Four characters a token, and 0.05 tokens of statements for each character.
    assert {row for _, row in parts} == {int(10_000 / 0.3)}
    assert {len(part) for part, _ in parts[:-1]} == {int(extend.PIECE * int(10_000 / 0.3))}


def test_a_command_that_has_ended_well_is_not_run_again(tmp_path: Path) -> None:
    rows = [("a", "longctx no-such-command 1", 0), ("b", "longctx no-such-command 2", -1)]
    lines = [json.dumps({"name": n, "command": c, "code": code}) + "\n" for n, c, code in rows]
    (tmp_path / "extension.jsonl").write_text("".join(lines))
    run = extend.Commands(tmp_path, Budget(60), where=())
    assert run("a", "no-such-command", "1")
    assert not run("a", "no-such-command", "3")
    assert not run("b", "no-such-command", "2")
    assert len((tmp_path / "extension.jsonl").read_text().splitlines()) == 4


def test_a_package_is_a_document_if_it_is_long_enough(tmp_path: Path) -> None:
    for package, number in (("long", 3), ("short", 1)):
        (tmp_path / package / "inner").mkdir(parents=True)
        for n in range(number):
            file = tmp_path / package / ("inner" if n % 2 else "") / f"{n}.py"
            file.write_text('"""' + "It\nsays. " * (extend.LEAST_LONG // 25) + '"""\n')
    files = list(extend.sources(["long", "missing", "short"], tmp_path))
    (document,) = extend.joined(files)
    heads = re.findall("^# (.+)$", document, re.MULTILINE)
    assert heads == ["long/0.py", "long/2.py", "long/inner/1.py"]
    (prose,) = extend.joined(extend.running(extend.docstrings(["long", "short"], tmp_path)))
    assert set(prose.split("It says. ")) == {""}


def test_lengths_of_an_evaluation_are_powers_of_two_up_to_the_context() -> None:
    lengths = {name: run.lengths() for name, run in extend.RUNS.items()}
    assert lengths["theta_64k"] == "4K,8K,16K,32K,64K"
    assert lengths["theta_128k"] == "4K,8K,16K,32K,64K,128K"
