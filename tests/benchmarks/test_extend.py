"""What extend.py trains on: statements that are made twice, and documents of whole folders."""

import random
import re
from pathlib import Path

import extend


def test_statements_are_made_again_further_on_and_the_text_stays() -> None:
    text = "".join(f"line {n} of a document about something\n" for n in range(4000))
    most = 20_000
    found = extend.with_recalls(text, random.Random(0), most)
    first = r"\nNote: the (\w+ \w+) has the number (\d+)\. Keep it in mind\.\n"
    again = r"\nAs noted, the (\w+ \w+) has the number (\d+)\.\n"
    places = {match.groups(): match.start() for match in re.finditer(first, found)}
    assert len(places) == len(text) // extend.RECALL_EVERY
    repeated = {match.groups(): match.start() for match in re.finditer(again, found)}
    assert repeated.keys() == places.keys()
    for said, place in places.items():
        # Other statements may lie between the two.
        assert 0 < repeated[said] - place < most + 200 * len(places)
    assert re.sub(again, "", re.sub(first, "", found)) == text


def test_a_folder_is_a_document_if_it_is_long_enough(tmp_path: Path) -> None:
    for folder, number in (("long", 3), ("short", 1)):
        (tmp_path / "package" / folder).mkdir(parents=True)
        for n in range(number):
            file = tmp_path / "package" / folder / f"{n}.py"
            file.write_text("x = 1\n" * (extend.LEAST_LONG // 18))
    (document,) = extend.joined_sources(["package", "missing"], tmp_path)
    heads = re.findall("^# (.+)$", document, re.MULTILINE)
    assert heads == [f"package/long/{n}.py" for n in range(3)]
    lengths = {name: run.lengths() for name, run in extend.RUNS.items()}
    assert lengths["theta_64k"] == "4K,8K,16K,32K,64K"
    assert lengths["theta_128k"] == "4K,8K,16K,32K,64K,128K"
