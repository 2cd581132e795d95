"""RULER's `qa_1` and `qa_2`: a question of SQuAD or HotpotQA, and its documents among others."""

from random import Random

from longctx_patch.evaluation.tasks.generator import Draw, Generator, HaystackTooSmallError, Setup
from longctx_patch.evaluation.tasks.question_sets import Question, QuestionSet

PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {question} Answer:"
)
NUM_OTHERS = 40
"""Answers to other questions that a sample offers as wrong ones; few of them are taken."""


class DocumentGenerator(Generator):
    num_answer_tokens = 32
    step = 10

    def __init__(self, setup: Setup, found: QuestionSet) -> None:
        super().__init__(setup)
        self.documents, self.questions = found.documents, found.questions

    def find_size(self) -> int:
        return self.bisect(self.room, self.most_units(self.setup.length))

    def draw(self, size: int, index: int, depth: float | None) -> Draw:
        if index >= len(self.questions):
            raise ValueError(
                f"{self.setup.task}: the file has {len(self.questions):,} questions. Take as many "
                "samples at most."
            )
        question = self.questions[index]
        chosen = self._documents(question, size)
        Random(self.setup.seed).shuffle(chosen)
        context = "\n\n".join(
            f"Document {number}:\n{document}" for number, document in enumerate(chosen, start=1)
        )
        return Draw(
            text=PROMPT.format(context=context, question=question.text),
            answers=question.answers[:1],  # the others are the same in other words
            others=self._wrong_answers(question, index),
        )

    def _documents(self, question: Question, size: int) -> list[str]:
        if size >= len(self.documents):
            times = -(-size // len(self.documents))
            return (self.documents * times)[:size]
        own, num_more = question.needed, size - len(question.needed)
        if num_more < 0:
            raise HaystackTooSmallError
        if num_more > len(question.related):
            own = own + question.related
            known = set(own)
            rest = [number for number in range(len(self.documents)) if number not in known]
            # A paragraph may be given twice, so these may be more than are asked for.
            numbers = own + self.random.sample(rest, max(0, size - len(own)))
        else:
            numbers = own + self.random.sample(question.related, num_more)
        return [self.documents[number] for number in numbers]

    def _wrong_answers(self, question: Question, index: int) -> tuple[str, ...]:
        """Answers to other questions; the opposite where it is yes or no."""
        opposite = {"yes": ("no",), "no": ("yes",)}.get(question.answers[0])
        if opposite is not None:
            return opposite
        right = {answer.lower() for answer in question.answers}
        drawn = Random(f"{self.setup.seed} {index}").sample(
            self.questions, min(NUM_OTHERS, len(self.questions))
        )
        texts = dict.fromkeys(each.answers[0] for each in drawn)
        return tuple(text for text in texts if text.lower() not in right | {"yes", "no"})
