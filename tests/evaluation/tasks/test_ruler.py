"""RULER's tasks have the texts of its definition, written down here a second time."""

import json
import math
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx_patch.evaluation.tasks import Sources, make_samples, materials
from longctx_patch.evaluation.tasks.materials import Haystack, WordPairs, split_at_stops

WORDS = {
    "adjective": ["old", "teeny-tiny", "old-fashioned", "teeny", "ad hoc", "red", "oldest"],
    "noun": ["fashioned", "tiny-x", "ant", "zebra", "go-kart", "creme brulee", "axe"],
    "verb": ["go", "ant", "run", "walk", "sing", "jump", "see", "hear"],
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAYS = "\n\n".join(f"Is this  essay {n}? It has {n * n} words." for n in range(150))
Draw = Callable[[int], tuple[str, list[str]]]


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materials, "_words", WORDS.__getitem__)


def bisected(draw: Draw, count: Callable[[str], int], step: int, room: int, length: int) -> int:
    tokens = count(draw(step)[0]) / step
    low, high, best = step, max(int((length / tokens) * 3), 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        if count(draw(middle)[0]) <= room:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def fitted(draw: Draw, count: Callable[[str], int], size: int, step: int, room: int) -> Any:
    while True:
        text, answers = draw(size)
        if count(text) <= room:
            return text, answers
        size -= step if size > step else 0


def niah_single_1(count: Callable[[str], int], length: int, seed: int, number: int) -> list[Any]:
    rng = random.Random(seed)
    pairs = sorted({f"{a}-{n}" for a in WORDS["adjective"] for n in WORDS["noun"]})

    def draw(num_lines: int) -> tuple[str, list[str]]:
        key = rng.choice(pairs)
        value = str(rng.randint(1000000, 9999999))
        lines = [NOISE] * num_lines
        (place,) = rng.sample(range(num_lines), 1)
        lines.insert(place, f"One of the special magic numbers for {key} is: {value}.")
        rng.sample(range(1), 1)  # which key is asked for
        text = "\n".join(lines)
        return (
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the number afterwards.\n{text}\nWhat is the special magic "
            f"number for {key} mentioned in the provided text? The special magic number for {key} "
            "mentioned in the provided text is"
        ), [value]

    size = bisected(draw, count, 5, length - 128, length)
    return [fitted(draw, count, size, 5, length - 128) for _ in range(number)]


def niah_multikey_1(count: Callable[[str], int], length: int, seed: int, number: int) -> list[Any]:
    rng = random.Random(seed)
    pairs = sorted({f"{a}-{n}" for a in WORDS["adjective"] for n in WORDS["noun"]})
    percents = [round(float(p)) for p in np.linspace(0, 100, 40)]
    words = ESSAYS.split()

    def draw(num_words: int) -> tuple[str, list[str]]:
        keys, values = [], []
        for _ in range(4):
            keys.append(rng.choice(pairs))
            values.append(str(rng.randint(1000000, 9999999)))
        needles = [
            f"One of the special magic numbers for {key} is: {value}."
            for key, value in zip(keys, values, strict=True)
        ]
        random.Random(seed).shuffle(needles)
        beginning = " ".join((words * (num_words // len(words) + 1))[:num_words])
        sentences = re.findall(r"\S.*?(?:[.?!](?= |$)|$)", beginning)
        places = sorted(int(len(sentences) * (p / 100)) for p in rng.sample(percents, 4))
        text = ""
        for start, stop, needle in zip([0, *places], places, needles, strict=False):
            text += " ".join(sentences[start:stop]) + f" {needle} "
        text += " ".join(sentences[places[-1] :])
        (asked,) = rng.sample(range(4), 1)
        return (
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the number afterwards.\n{text}\nWhat is the special magic "
            f"number for {keys[asked]} mentioned in the provided text? The special magic number "
            f"for {keys[asked]} mentioned in the provided text is"
        ), [values[asked]]

    size = bisected(draw, count, 500, length - 128, length)
    return [fitted(draw, count, size, 500, length - 128) for _ in range(number)]


def vt(count: Callable[[str], int], length: int, seed: int, number: int) -> list[Any]:
    rng, numbers = random.Random(seed), np.random.RandomState(seed)

    def question(num_lines: int, letters: int) -> tuple[str, list[str]]:
        names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(5)]
        value = "12345" if letters == 3 else str(numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {names[n]} = VAR {names[n - 1]} " for n in range(1, 5)]
        lines = [NOISE] * num_lines
        for n, place in enumerate(sorted(rng.sample(range(num_lines), 5))):
            lines.insert(place + n, chain[n])
        text = "\n".join(lines)
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{text}\nQuestion: Find all variables that are assigned the value {value} in the "
            "text above. Answer: According to the chain(s) of variable assignment in the text "
            f"above, 5 variables are assgined the value {value}, they are: "
        ), names

    def icl_draw(num_lines: int) -> tuple[str, list[str]]:
        return question(num_lines, 3)

    text, names = fitted(icl_draw, count, bisected(icl_draw, count, 5, 500, 500), 5, 500)
    example = f"{text} {' '.join(names)}\n"

    def draw(num_lines: int) -> tuple[str, list[str]]:
        asked, answers = question(num_lines, 5)
        solved = example
        for name in names:
            solved = solved.replace(name, "".join(rng.choices(string.ascii_uppercase, k=3)))
        solved = solved.replace("12345", str(numbers.randint(10000, 99999)))
        return f"{solved}\n{asked}", answers

    room = length - 30 - count(example)
    size = bisected(lambda lines: question(lines, 5), count, 5, room, length)
    return [fitted(draw, count, size, 5, length - 30) for _ in range(number)]


def fwe(count: Callable[[str], int], length: int, seed: int, number: int) -> list[Any]:
    rng, room = random.Random(seed), length - 50

    def codes() -> list[str]:
        found: set[str] = set()
        while len(found) < room // 50:
            found.add("".join(rng.choices(string.ascii_lowercase, k=6)))
        listed = sorted(found)
        random.Random(seed).shuffle(listed)
        return ["...", *listed[1:]]

    def text(vocab: list[str], size: int) -> str:
        words: list[str] = []
        for rank, word in enumerate(vocab, start=1):
            words += [word] * int(size * float(rank) ** -2.0 / (math.pi**2 / 6))
        random.Random(seed).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}\nQuestion: Do not "
            "provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text? Answer: According to the coded "
            "text above, the three most frequently appeared words are:"
        )

    first, size = codes(), room // 6
    while count(text(first, size)) < room:
        size += room // 32
    size -= room // 32
    found = []
    for _ in range(number):
        vocab, own = codes(), size
        while count(text(vocab, own)) > room:
            own -= room // 32
        found.append((text(vocab, own), vocab[1:4]))
    return found


@pytest.mark.parametrize(("length", "seed"), [(3231, 42), (2909, 7)])
@pytest.mark.parametrize("definition", [niah_single_1, niah_multikey_1, vt, fwe])
def test_texts_are_those_of_the_definition(
    definition: Any,
    length: int,
    seed: int,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The essays' sentences are NLTK's, which has to be downloaded: here they are plain ones."""
    monkeypatch.setattr(materials, "_punkt", lambda: split_at_stops)
    essays = tmp_path / "essays.json"
    essays.write_text(json.dumps({"text": ESSAYS}))

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    name = definition.__name__
    made = make_samples(
        [name], tokenizer, length, per_cell=5, seed=seed, sources=Sources(essays=essays)
    )
    for sample, (text, answers) in zip(made, definition(count, length, seed, 5), strict=True):
        assert list(sample.prompt) == tokenizer(text).input_ids
        assert [tokenizer.decode(ids).strip() for ids in sample.answers] == answers
        assert sample.num_tokens <= sample.length == length


def test_pairs_are_those_of_the_sorted_list() -> None:
    """Adjectives that begin with another one and a hyphen stand among its pairs."""
    listed = sorted({f"{a}-{n}" for a in WORDS["adjective"] for n in WORDS["noun"]})
    pairs = WordPairs(WORDS["adjective"], WORDS["noun"])
    assert [pairs[index] for index in range(len(pairs))] == listed
    assert random.Random(3).choice(pairs) == random.Random(3).choice(listed)


def test_sentences_of_a_beginning_are_those_of_its_text() -> None:
    """Whatever was asked for before, and where the text begins anew."""
    text = 'One  is here. "Two is!" There are (three?) of\nthese. ' + "word " * 90 + "End."
    words = text.split()
    haystack = Haystack(text, split_at_stops, "own text")
    for num_words in (3, 250, 8, 12, 99, len(words), 41, 2 * len(words) + 5):
        beginning = " ".join((words * 3)[:num_words])
        assert haystack.sentences(num_words) == split_at_stops(beginning)
        assert " ".join(haystack.sentences(num_words)) == beginning


def test_who_asks_while_a_text_is_cut_sees_no_half_of_it() -> None:
    """As threads do that share the haystack."""
    text = " ".join(f"This is sentence {number}." for number in range(50))
    found = []

    class Sentences(list[str]):
        def __iter__(self) -> Iterator[str]:
            for number, sentence in enumerate(list(super().__iter__())):
                if number == 2 and len(self) > 20:
                    found.append(haystack.sentences(30))
                yield sentence

    haystack = Haystack(text, lambda part: Sentences(split_at_stops(part)), "own text")
    assert haystack.sentences(120) == split_at_stops(text)[:30]
    assert found == [[*split_at_stops(text)[:7], "This is"]]


OWN = " ".join(f"This is sentence {number} of many." for number in range(900))


def test_a_needle_is_where_it_is_asked_for(tokenizer: Any) -> None:
    """Also among other needles; the others stay where they are drawn."""
    names = ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"]
    depths = (0.0, 0.3, 1.0)
    made = make_samples(
        names, tokenizer, 2048, per_cell=2, depths=depths, sources=Sources(text=OWN)
    )
    assert [(each.task, each.depth) for each in made] == [
        (name, depth) for name in names for depth in depths for _ in range(2)
    ]
    for sample in made:
        text = tokenizer.decode(sample.prompt)
        context = text[text.index("afterwards.\n") : text.rindex("\nWhat is")]
        place = context.index(tokenizer.decode(sample.answers[0]).strip()) / len(context)
        assert sample.depth is not None
        assert abs(place - sample.depth) < 0.12
        assert 1500 < sample.num_tokens <= 2048  # the haystack fills the row


def test_ranked_tasks_have_wrong_answers_of_the_same_kind(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"adjective": ["old"], "verb": [], "noun": [f"n{n}x" for n in range(4200)]}
    monkeypatch.setattr(materials, "_words", many.__getitem__)
    names = ["niah_multivalue", "niah_multiquery", "cwe"]
    for sample in make_samples(
        names, tokenizer, 8192, per_cell=2, depths=(0.5,), sources=Sources(text=OWN)
    ):
        text = tokenizer.decode(sample.prompt)
        right, wrong = (
            [tokenizer.decode(ids).strip() for ids in found]
            for found in (sample.answers, sample.others)
        )
        assert sample.scoring == "ranked"
        assert sample.depth is None
        assert len(set(right + wrong)) == 8
        if sample.task == "cwe":  # 3 times in the row's list
            right, wrong = (
                [text.count(f". {word.removeprefix('1. ')} ") for word in found]
                for found in (right, wrong)
            )
            assert min(right) >= 30 > 4 >= max(wrong)
        else:  # each digit is in the text, and no wrong number as a whole
            assert all(value in text for value in right)
            assert not any(value in text for value in wrong)
            assert {value[:3] for value in wrong} == {value[:3] for value in right}


def test_questions_of_squad_and_hotpotqa(tmp_path: Path, tokenizer: Any) -> None:
    paragraphs = [
        {
            "context": f"Paragraph {n} says that the answer is {n}.",
            "qas": [
                {"question": "Which?", "answers": [{"text": f"{n}"}], "is_impossible": n % 2 == 0}
            ],
        }
        for n in range(60)
    ]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = tmp_path / "hotpot.json"
    context = [[f"Title {n}", [f"Fact {n}.", " More."]] for n in range(40)]
    hotpot.write_text(
        json.dumps(
            [
                {"question": f"Is it {n}?", "answer": answer, "context": context[n : n + 10]}
                for n, answer in enumerate(["yes", "no", "Fact", "Title", "More"])
            ]
        )
    )
    made = make_samples(
        ["qa_1", "qa_2"],
        tokenizer,
        1500,
        per_cell=3,
        sources=Sources(squad=squad, hotpotqa=hotpot),
    )
    for number, sample in enumerate(made):
        text = tokenizer.decode(sample.prompt)
        right = [tokenizer.decode(ids) for ids in sample.answers]
        if sample.task == "qa_1":
            assert right == [f" {2 * number + 1}"]
            assert f"\nParagraph {2 * number + 1} says" in text
        else:
            assert right == [[" yes"], [" no"], [" Fact"]][number - 3]
            assert all(f"Title {number - 3 + n}\nFact" in text for n in range(10))
        assert not {*sample.answers} & {*sample.others}
    assert [tokenizer.decode(ids) for ids in made[3].others] == [" no"]
    with pytest.raises(ValueError, match="the file has 5 questions"):
        make_samples(["qa_2"], tokenizer, 1500, per_cell=6, sources=Sources(hotpotqa=hotpot))
