"""Questions and documents of SQuAD and HotpotQA, numbered as RULER numbers them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    needed: list[int]
    """Numbers of the documents that answer it."""
    related: list[int]
    """Paragraphs of the same article, which are taken before others."""


@dataclass(frozen=True)
class QuestionSet:
    documents: list[str]
    questions: list[Question]


def squad(content: Any) -> QuestionSet:
    """SQuAD 2.0: paragraphs, and the questions that can be answered."""
    articles = content["data"]
    documents = sorted({each["context"] for article in articles for each in article["paragraphs"]})
    number = {document: index for index, document in enumerate(documents)}
    questions = []
    for article in articles:
        of_article = [number[each["context"]] for each in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            questions += [
                Question(
                    found["question"],
                    tuple(answer["text"] for answer in found["answers"]),
                    [own],
                    [each for each in of_article if each != own],
                )
                for found in paragraph["qas"]
                if not found["is_impossible"]
            ]
    return QuestionSet(documents, questions)


def hotpotqa(content: Any) -> QuestionSet:
    """HotpotQA: each question has ten documents of its own."""
    contexts = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in found["context"]]
        for found in content
    ]
    documents = sorted({document for context in contexts for document in context})
    number = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(found["question"], (found["answer"],), [number[each] for each in context], [])
        for found, context in zip(content, contexts, strict=True)
    ]
    return QuestionSet(documents, questions)
