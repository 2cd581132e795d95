"""Reads what tasks are made of: the user's text and files, and the word lists of wonderwords."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from longctx_patch.evaluation.tasks.question_sets import QuestionSet, hotpotqa, squad
from longctx_patch.rules import strict_json

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's haystack without information, as a line each; it began with the passkey test."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """A text, and files that are read once, when the first task needs them."""

    text: str | None = field(default=None, repr=False)
    """The user's own: the haystack of `passkey`, and of RULER's tasks that hide their needles in
    essays, if there are no essays."""
    essays: Path | None = None
    """RULER's PaulGrahamEssays.json: `{"text": ...}`."""
    squad: Path | None = None
    """SQuAD 2.0's dev-v2.0.json, for `qa_1`."""
    hotpotqa: Path | None = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for `qa_2`."""
    english_words: Path | None = None
    """RULER's english_words.json, `{"0": "word", ...}`: what `cwe` draws from where a row has more
    words than wonderwords."""

    def __post_init__(self) -> None:
        if self.text is not None and not self.text.strip():
            raise ValueError("the text is empty, so it hides no needle. Give another, or none.")
        for name in ("essays", "squad", "hotpotqa", "english_words"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}={str(path)!r}: there is no such file.")

    @cached_property
    def haystack(self) -> "Haystack":
        """RULER's essays, or the user's own text in their place."""
        if self.essays is not None:
            text = _read_json(Path(self.essays), "essays", lambda value: value["text"])
            return Haystack(text, _punkt(), f"essays of {Path(self.essays).name}", step=500)
        if self.text is not None:
            name = f"own text of {len(self.text.split()):,} words, repeated in longer rows"
            return Haystack(self.text, split_at_stops, name)
        essays = _given("essays", "RULER's PaulGrahamEssays.json")
        raise ValueError(
            "niah_single_2 and other tasks hide their needles in essays. Give a text of your own "
            f"(`longctx eval --text FILE`, Sources(text=...)), or {essays}."
        )

    @cached_property
    def word_pairs(self) -> "WordPairs":
        """RULER's keys: `adjective-noun`."""
        return WordPairs(_words("adjective"), _words("noun"))

    @cached_property
    def single_words(self) -> list[str]:
        """Nouns, adjectives and verbs, sorted."""
        return sorted({word for kind in ("noun", "adjective", "verb") for word in _words(kind)})

    @cached_property
    def more_words(self) -> list[str] | None:
        """RULER's second list of words, None if there is none."""
        if self.english_words is None:
            return None
        return _read_json(
            Path(self.english_words), "english_words", lambda value: list(value.values())
        )

    @cached_property
    def squad_questions(self) -> QuestionSet:
        return self._questions("squad", "dev-v2.0.json of SQuAD", squad)

    @cached_property
    def hotpotqa_questions(self) -> QuestionSet:
        return self._questions("hotpotqa", "hotpot_dev_distractor_v1.json of HotpotQA", hotpotqa)

    def _questions(
        self, name: str, file: str, content: Callable[[Any], QuestionSet]
    ) -> QuestionSet:
        path = getattr(self, name)
        if path is None:
            raise ValueError(f"There is no {name} to ask questions of: {_given(name, file)}.")
        found: QuestionSet = _read_json(Path(path), name, content)
        return found


def _given(name: str, file: str) -> str:
    """Returns where to give a file."""
    option = name.replace("_", "-")
    return f"give {file} (`longctx eval --{option} FILE`, Sources({name}=FILE))"


class Haystack:
    """A text as words, of which the first are cut into sentences."""

    def __init__(
        self,
        text: str,
        split: Callable[[str], list[str]],
        name: str,
        step: int | None = None,
    ) -> None:
        self._words = re.sub(r"\s+", " ", text).split(" ")
        self._split = split
        self.name, self.step = name, step
        if not text.strip():
            raise ValueError(f"{name}: there is no text, so it hides no needle.")
        self._cut = _Cut(num_words=0, sentences=[], ends=[])

    def sentences(self, num_words: int) -> list[str]:
        """Sentences of the first words, which begin anew where the text is over.

        Whether a sentence ends is seen from the words up to the next one. So the sentences of a
        beginning are those of a longer text, except for the last.
        """
        beginning = self._text(num_words)
        cut = self._cut_of(num_words)
        whole = bisect_right(cut.ends, len(beginning) - 1)
        rest = beginning[cut.ends[whole - 1] if whole else 0 :].strip()
        return cut.sentences[:whole] + ([rest] if rest else [])

    def _text(self, num_words: int) -> str:
        times, rest = divmod(num_words, len(self._words))
        return " ".join(self._words * times + self._words[:rest]).strip()

    def _cut_of(self, num_words: int) -> "_Cut":
        """Cuts so many words or more. Threads that share this may cut twice, but never see half."""
        cut = self._cut
        if num_words > cut.num_words:
            longer = max(num_words, 2 * cut.num_words)
            text, end, ends = self._text(longer), 0, []
            sentences = self._split(text)
            for sentence in sentences:
                end = text.index(sentence, end) + len(sentence)
                ends.append(end)
            self._cut = cut = _Cut(num_words=longer, sentences=sentences, ends=ends)
        return cut


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The first words of a haystack as sentences."""

    num_words: int
    sentences: list[str]
    ends: list[int]
    """Where each ends in the text of these words."""


def split_at_stops(text: str, longest: int = 40) -> list[str]:
    """Sentences of the user's own text, which may be code: of `longest` words at most."""
    found: list[str] = []
    words: list[str] = []
    for word in text.split(" "):
        words.append(word)
        if len(words) == longest or word.rstrip("\"')]}").endswith((".", "!", "?")):
            found.append(" ".join(words))
            words = []
    return found + ([" ".join(words)] if words else [])


class WordPairs(Sequence[str]):
    """All `adjective-noun`, sorted, without keeping the six millions of them.

    Pairs of one adjective follow each other, except where another one begins with it and a hyphen
    (`old`, `old-fashioned`): only these are sorted pair by pair.
    """

    def __init__(self, adjectives: list[str], nouns: list[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[str | list[str]] = []
        self._starts = [0]
        heads = sorted({f"{adjective}-" for adjective in adjectives})
        first = ""

        def first_of_block(head: str) -> str:
            nonlocal first
            if not (first and head.startswith(first)):
                first = head
            return first

        for head, group in groupby(heads, first_of_block):
            members = list(group)
            if len(members) == 1:
                self._blocks.append(head)
                num_pairs = len(self._nouns)
            else:
                pairs = sorted({member + noun for member in members for noun in self._nouns})
                self._blocks.append(pairs)
                num_pairs = len(pairs)
            self._starts.append(self._starts[-1] + num_pairs)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        block = bisect_right(self._starts, index) - 1
        content, within = self._blocks[block], index - self._starts[block]
        return content[within] if isinstance(content, list) else content + self._nouns[within]


@dataclass(frozen=True)
class Record:
    """One line of a JSONL file."""

    place: str
    """`FILE, line 3`"""
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """The field's text. Raises ValueError with file and line."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name!r} is to be a text, and is {value!r}.")
        return value

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.place}: {problem}")


def records(path: Path) -> Iterator[Record]:
    """The objects of a JSONL file. Raises ValueError with file and line."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}). Write it anew in UTF-8.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            value = strict_json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{place}: each line is to be an object, such as {{...}}.")
        yield Record(place, value)


def _read_json(path: Path, name: str, content: Callable[[Any], Any]) -> Any:
    try:
        return content(strict_json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: not the JSON that `{name}` has when RULER downloads it ({error!r})."
        ) from None


def _words(kind: str) -> list[str]:
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise ValueError(
            "RULER takes its words from the package wonderwords: pip install wonderwords"
        ) from None
    return list(RandomWord().filter(include_categories=[kind]))


def _punkt() -> Callable[[str], list[str]]:
    """NLTK's sentences, as RULER cuts its essays."""
    try:
        from nltk.tokenize import sent_tokenize

        sent_tokenize("One. Two.")
    except (ImportError, LookupError):
        raise ValueError(
            "RULER cuts its essays into sentences with NLTK: pip install nltk, then "
            "python -m nltk.downloader punkt_tab"
        ) from None
    return cast(Callable[[str], list[str]], sent_tokenize)
