"""Recall questions together with the words that a single process answers them with."""

from __future__ import annotations

from dataclasses import dataclass

from serving_core.model.loading import load_model
from serving_core.request import SamplingParams
from serving_core.tokenizer import Tokenizer
from tandem.default_model import default_model_dir, recall_questions
from tandem.single_process import SingleProcessEngine

MODEL_NAME = default_model_dir().name


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """A prompt, and the words of the greedy answer of exactly `max_tokens` tokens."""

    prompt: str
    words: list[str]


def known_answers(*, num_questions: int, num_words: int, max_tokens: int) -> list[KnownAnswer]:
    """Questions about contexts of `num_words` words and a little more, no two of equal length."""
    engine = SingleProcessEngine(
        load_model(default_model_dir()), num_blocks=256, block_size=16, chunk_tokens=256
    )
    tokenizer = Tokenizer.from_dir(default_model_dir())
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answers = []
    for index in range(num_questions):
        [question] = recall_questions(
            num_words=num_words + 7 * index, num_facts=2, num_questions=1, seed=index
        )
        token_ids = engine.generate(tokenizer.encode(question.prompt), greedy)
        words = tokenizer.decode(token_ids).split()
        assert words[:3] == question.answer.split()
        answers.append(KnownAnswer(prompt=question.prompt, words=words))
    return answers
