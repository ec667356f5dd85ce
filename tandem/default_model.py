"""The model that ships with the package, and prompts that it can answer.

It recalls facts: a context is filler words with facts `. NAME w1 w2 w3` among them, and after
`? NAME` the model gives the three words. Its README in the same folder has the measured recall.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

NUM_ANSWER_WORDS = 3
_FACT_WORDS = 2 + NUM_ANSWER_WORDS


def default_model_dir() -> Path:
    """Directory of the packaged checkpoint.

    Raises:
        FileNotFoundError: The package was installed in a way that keeps no files on disk.
    """
    model_dir = Path(str(files("tandem") / "data" / "tiny-recall"))
    if not model_dir.is_dir():
        raise FileNotFoundError(f"the packaged model is not a directory on disk: {model_dir}")
    return model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallQuestion:
    """A prompt and the right answer.

    Attributes:
        prompt: Text that ends with `? NAME`.
        answer: The three words of the fact about NAME.
        num_words: Words of the prompt; one token each.
    """

    prompt: str
    answer: str
    num_words: int


def recall_questions(
    *, num_words: int, num_facts: int, num_questions: int, seed: int
) -> list[RecallQuestion]:
    """Random questions about one random context.

    Args:
        num_words: Words of the context with the question, the leading `<bos>` included.
        num_facts: Facts in the context, each about its own name.
        num_questions: How many of them to ask about, each in a prompt of its own.
        seed: Equal seeds give equal questions.

    Raises:
        ValueError: The context has no room for the facts.
    """
    num_filler = num_words - 1 - num_facts * _FACT_WORDS - 2
    if num_filler < num_facts or num_questions > num_facts:
        raise ValueError(
            f"{num_words} words hold fewer than {num_facts} facts, or {num_questions} questions "
            "are more than the facts"
        )
    words = json.loads((default_model_dir() / "words.json").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    names = rng.sample(words["names"], num_facts)
    # Each word stands in one fact only, as in the model's training.
    values = iter(rng.sample(words["values"], num_facts * NUM_ANSWER_WORDS))
    facts = {name: [next(values) for _ in range(NUM_ANSWER_WORDS)] for name in names}
    context = rng.choices(words["filler"], k=num_filler)
    # From the last position to the first, so that earlier positions stay where they are.
    positions = sorted(rng.sample(range(num_filler), num_facts), reverse=True)
    for name, position in zip(names, positions, strict=True):
        context[position:position] = [".", name, *facts[name]]
    asked = rng.sample(names, num_questions)
    return [
        RecallQuestion(
            prompt=" ".join(["<bos>", *context, "?", name]),
            answer=" ".join(facts[name]),
            num_words=num_words,
        )
        for name in asked
    ]
