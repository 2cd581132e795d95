"""Passkeys, questions of the user's own, and what is refused before a model runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from longctx_patch.evaluation.tasks import (
    TASKS,
    Sources,
    haystacks,
    make_at_lengths,
    make_samples,
    materials,
    read_questions,
)
from longctx_patch.evaluation.tasks.variables import VariableGenerator
from longctx_patch.recipes.models import byte_tokenizer


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materials, "_words", lambda kind: [f"{kind}{n}" for n in range(9)])


def test_passkeys_fill_the_row_and_are_where_they_are_asked_for(
    tokenizer: Any, joining_tokenizer: Any
) -> None:
    text = "\n".join(f"This is line {number}." for number in range(300))
    for found, source in (
        (tokenizer, Sources()),
        (tokenizer, Sources(text=text)),
        (joining_tokenizer, Sources(text=text)),
    ):
        made = make_samples(["passkey"], found, 1021, per_cell=2, seed=3, sources=source)
        assert made == make_samples(["passkey"], found, 1021, per_cell=2, seed=3, sources=source)
        assert [each.depth for each in made[::2]] == [0.05, 0.25, 0.5, 0.75, 0.95]
        assert len({each.answers for each in made}) == 10
        for sample in made:
            row = found.decode([*sample.prompt, *sample.answers[0]])
            key = found.decode(sample.answers[0]).strip()
            assert sample.num_tokens == 1021
            assert row.endswith(f"The pass key is {key}")
            assert f"The pass key is {key}. Remember it. {key} is the pass key." in row
            assert sample.depth is not None
            assert abs(row.index(key) / len(row) - sample.depth) < 0.15
    assert haystacks(["passkey", "vt"], Sources(text=text)) == {"passkey": "own text"}
    assert haystacks(["niah_single_2"], Sources(text=text)) == {
        "niah_single_2": "own text of 1,200 words, repeated in longer rows"
    }
    assert haystacks(["passkey"], Sources()) == {"passkey": "noise"}


def test_threads_make_the_same_samples_and_refuse_each_task_for_itself(tokenizer: Any) -> None:
    names, lengths = ("passkey", "niah_single_1", "niah_single_2"), (2048, 512, 1024)
    found = make_at_lengths(names, tokenizer, lengths, 2, depths=(0.0, 1.0))
    assert [name for name, _ in found] == [*names] * 3
    for (name, made), length in zip(found, (each for each in lengths for _ in names), strict=True):
        if name == "niah_single_2":
            with pytest.raises(ValueError, match="essays"):
                made.result()
        else:
            expected = make_samples([name], tokenizer, length, 2, depths=(0.0, 1.0))
            assert made.result() == expected
    assert make_at_lengths((), None, lengths, 2) == []


def test_answers_that_join_the_prompt_are_still_what_greedy_decoding_emits(
    joining_tokenizer: Any,
) -> None:
    """RULER's `vt` ends with a space, which some tokenizers join with the answer's."""
    (sample,) = make_samples(["vt"], joining_tokenizer, 4096, per_cell=1)
    text = joining_tokenizer.decode(sample.prompt)
    names = [joining_tokenizer.decode(part).strip() for part in sample.answers]
    assert sample.prompt[0] == joining_tokenizer.bos_token_id
    assert text.endswith("they are: ")
    assert len(sample.spellings) == 1
    for way, gap in ((sample.answers, " "), (sample.spellings[0], "")):
        ids = list(sample.prompt) + [token for part in way for token in part]
        assert joining_tokenizer.decode(ids) == f"{text}{gap}{' '.join(names)}"


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown task": ({"names": ["niah_singel_1"]}, "Did you mean 'niah_single_1'"),
    "no length": ({"length": 0}, "length=0: give a whole number"),
    "no samples": ({"per_cell": 0}, "per_cell=0: give a whole number"),
    "depth in percent": ({"depths": (5, 50)}, r"depths=\[5, 50\]: give numbers from 0 to 1"),
    "short passkey": ({"length": 40}, "passkey: 40 tokens are too few, since .* have"),
    "short niah": ({"names": ["niah_single_1"], "length": 200}, "niah_single_1: 200 tokens are"),
    "short vt": ({"names": ["vt"], "length": 600}, r"vt: 600 tokens are too few\. .* have 9\d\d"),
    "vt of bytes": (
        {"names": ["vt"], "tokenizer": byte_tokenizer(), "length": 4096},
        "vt: its solved example, to which RULER leaves 500 tokens, has more",
    ),
    "short fwe": ({"names": ["fwe"], "length": 300}, "fwe: 300 tokens are too few. .* have 400"),
    "no essays": ({"names": ["niah_single_2"]}, r"--text FILE`, .* --essays FILE`, Sources\(es"),
    "no SQuAD": ({"names": ["qa_1"]}, r"There is no squad .*: give dev-v2.* --squad FILE`"),
    "no HotpotQA": ({"names": ["qa_2"]}, "give hotpot_dev_.* --hotpotqa FILE`"),
    "few words": ({"names": ["cwe"]}, "4,096 different words, .* has 27.*--english-words FILE"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_calls_that_are_refused(case: str, tokenizer: Any) -> None:
    changed, message = BAD_CALLS[case]
    arguments = {"names": ["passkey"], "tokenizer": tokenizer, "length": 2048, "per_cell": 1}
    with pytest.raises(ValueError, match=message):
        make_samples(**arguments | changed)


BAD_FILES: dict[str, tuple[str, str, str]] = {
    "other JSON": ("squad", '{"version": 1}', "f.json: not the JSON that `squad` has"),
    "no JSON": ("hotpotqa", "<html>", "f.json: not the JSON that `hotpotqa` has"),
    "empty": ("essays", '{"text": " "}', "essays of f.json: there is no text"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_refused(
    case: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, content, message = BAD_FILES[case]
    file = tmp_path / "f.json"
    file.write_text(content)
    monkeypatch.setattr(materials, "_punkt", lambda: str.split)
    names = [{"squad": "qa_1", "hotpotqa": "qa_2", "essays": "niah_single_2"}[field]]
    given: dict[str, Any] = {field: file}
    with pytest.raises(ValueError, match=message):
        make_samples(names, tokenizer, 4096, sources=Sources(**given))


def test_texts_that_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the text is empty, so it hides no needle"):
        Sources(text=" \n")
    with pytest.raises(ValueError, match=r"your text has .* tokens, and the haystack takes"):
        make_samples(["passkey"], tokenizer, 4096, sources=Sources(text="Few words. " * 9))


def test_files_and_packages_that_are_missing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"essays='.*nowhere.json': there is no such file"):
        Sources(essays=tmp_path / "nowhere.json")
    monkeypatch.undo()
    for module in ("wonderwords", "nltk.tokenize"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="pip install wonderwords"):
        make_samples(["niah_single_1"], tokenizer, 2048)
    monkeypatch.setattr(materials, "_words", lambda kind: [kind])
    essays = tmp_path / "essays.json"
    essays.write_text('{"text": "One. Two."}')
    with pytest.raises(ValueError, match=r"pip install nltk, then python -m nltk.downloader"):
        make_samples(["niah_single_2"], tokenizer, 2048, sources=Sources(essays=essays))


def changed(tokenizer: Any, normalizer: Any) -> PreTrainedTokenizerFast:
    found = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    found.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=found)


def test_a_tokenizer_that_loses_what_is_hidden(tokenizer: Any) -> None:
    """Small letters count, as RULER compares without case; digits that become one are lost."""
    lower = changed(tokenizer, normalizers.Lowercase())
    (sample,) = make_samples(["vt"], lower, 2048, per_cell=1)
    assert lower.decode(sample.answers[0]).islower()
    with pytest.raises(ValueError, match=r"passkey: the tokenizer does not give .*--tokeni"):
        make_samples(["passkey"], changed(tokenizer, normalizers.Replace("7", "1")), 512)


def test_an_answer_longer_than_what_is_left(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RULER leaves 30 tokens to five names; a tokenizer of letters takes as many, and spaces."""
    monkeypatch.setattr(VariableGenerator, "num_answer_tokens", 2)
    with pytest.raises(ValueError, match="vt: the answer has 30 tokens with this tokenizer, and"):
        make_samples(["vt"], tokenizer, 2075, per_cell=20)


QUESTION = {"context": "A is 1.", "question": "What is A?", "answers": "1"}


def questions(path: Path, *changes: dict[str, Any]) -> Path:
    lines = [json.dumps({k: v for k, v in (QUESTION | c).items() if v != ""}) for c in changes]
    path.write_text("\n\n".join(lines))
    return path


def test_questions_of_the_user(tmp_path: Path, tokenizer: Any) -> None:
    file = questions(
        tmp_path / "q.jsonl",
        {},
        {"answers": ["one", "1"]},
        {"wrong": ["2", "33"]},
        {"answers": ["1"], "choices": ["2", "1"]},
    )
    made = read_questions(file, tokenizer, 100)

    def texts(found: Any) -> list[str]:
        return [tokenizer.decode(ids) for ids in found]

    assert {tokenizer.decode(each.prompt) for each in made} == {
        "A is 1.\n\nQuestion: What is A?\nAnswer:"
    }
    assert [each.scoring for each in made] == ["forced", "forced", "ranked", "ranked"]
    assert [texts(each.answers) for each in made] == [[" 1"], [" one"], [" 1"], [" 1"]]
    assert [texts(way) for way in made[1].spellings] == [[" 1"]]
    assert [texts(each.others) for each in made] == [[], [], [" 2", " 33"], [" 2"]]
    assert {each.length for each in made} == {100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contxt": "a"}, "no field 'contxt' is read: these are context, question"),
        ({"question": 3}, "'question' is to be a text, and is 3"),
        ({"answers": []}, "'answers' is to be a text, or a list of texts, one or more"),
        ({"answers": [1]}, "'answers' is to be a list of texts"),
        ({"answers": ["1", "1"]}, "'answers' has a text twice"),
        ({"wrong": "2"}, "'wrong' is to be a list of texts"),
        ({"wrong": ["1"]}, "the answer '1' is right and wrong"),
        ({"choices": ["2", "3"]}, "the answer '1' is not among the choices"),
        ({"choices": ["1"]}, "all choices are right"),
        ({"choices": ["1", "2"], "wrong": ["2"]}, "give one of them"),
        ({"context": "A is 1. " * 60}, "longest answer have .* tokens, and the longest row has 99"),
    ],
)
def test_questions_that_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    file = questions(tmp_path / "q.jsonl", {}, change)
    with pytest.raises(ValueError, match=rf"q.jsonl, line 3: .*{message}"):
        read_questions(file, tokenizer, 99)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context"', "q.jsonl, line 1: "),
        ("[1]", "q.jsonl, line 1: each line is to be an object"),
        ("\n \n", "q.jsonl: the file has no question"),
        ("\xfc", "q.jsonl: not UTF-8 text"),
        (None, "q.jsonl: there is no such file"),
    ],
)
def test_files_of_questions_that_are_refused(
    content: str | None, message: str, tmp_path: Path, tokenizer: Any
) -> None:
    file = tmp_path / "q.jsonl"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_questions(file, tokenizer, 99)


def test_each_task_has_a_line() -> None:
    assert len(TASKS) == 14
    assert all(about and "\n" not in about for about in TASKS.values())
