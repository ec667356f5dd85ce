"""The packaged model is the trained one, and the questions about it have the right form."""

from __future__ import annotations

import hashlib
import re

import pytest

from serving_core.tokenizer import Tokenizer
from tandem.default_model import default_model_dir, recall_questions


def test_default_model_weights_match_the_readme() -> None:
    readme = (default_model_dir() / "README.md").read_text(encoding="utf-8")
    (published,) = re.findall(r"tiny-recall `([0-9a-f]{64})`", readme)
    weights = (default_model_dir() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == published


@pytest.mark.parametrize("num_words", [64, 256, 1024])
def test_recall_questions_ask_for_a_fact_of_the_context(num_words: int) -> None:
    tokenizer = Tokenizer.from_dir(default_model_dir())
    questions = recall_questions(num_words=num_words, num_facts=8, num_questions=4, seed=3)
    assert len({question.prompt.split()[-1] for question in questions}) == 4
    for question in questions:
        words = question.prompt.split()
        assert words[0] == "<bos>"
        assert words[-2] == "?"
        assert len(words) == question.num_words == num_words
        # One fact per name, and the answer stands in the context once.
        assert question.prompt.count(f". {words[-1]} {question.answer} ") == 1
        assert words.count(".") == 8
        assert len(tokenizer.encode(question.prompt)) == num_words
        assert len(question.answer.split()) == 3


def test_recall_questions_are_a_function_of_the_seed() -> None:
    arguments = {"num_words": 128, "num_facts": 4, "num_questions": 2}
    assert recall_questions(seed=1, **arguments) == recall_questions(seed=1, **arguments)
    assert recall_questions(seed=1, **arguments) != recall_questions(seed=2, **arguments)


@pytest.mark.parametrize(("num_words", "num_questions"), [(50, 2), (256, 9)])
def test_recall_questions_that_do_not_fit_are_refused(num_words: int, num_questions: int) -> None:
    with pytest.raises(ValueError, match="facts"):
        recall_questions(num_words=num_words, num_facts=8, num_questions=num_questions, seed=1)
