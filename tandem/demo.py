"""The demo: prefill, decode and router answer recall questions, and one process checks them.

    python -m tandem.demo

Each context is several times longer than what the model's attention selects per token, and the
fact asked for lies anywhere in it: an answer is right only if the KV that prefill pushed, indexer
keys included, arrived whole. Every question is asked twice: over gRPC, and through the router with
curl or the official OpenAI client, by completions or chat, streamed or not. Exit status 0 means
that every token equals the single process's, that the router gives the same words, and that most
facts were recalled.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.table import Table

from tandem.client import Client
from tandem.default_model import (
    NUM_ANSWER_WORDS,
    RecallQuestion,
    default_model_dir,
    recall_questions,
)
from tandem.demo_clients import Ask, HttpClient, HttpError, Way, all_ways, installed_clients
from tandem.generation import Completion
from tandem.launcher import Launcher, LauncherError, LaunchSettings

CONTEXT_WORDS = (256, 512, 1024)
NUM_FACTS = 8
QUESTIONS_PER_CONTEXT = 4
MIN_RECALL = 0.75
"""The model recalls over 0.9 at these lengths; with wrong KV it recalls nothing."""
_SEED = 1
_BLOCK_SIZE = 64
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered question.

    Attributes:
        question: What was asked.
        completion: What the pair answered over gRPC.
        routed_text: What it answered through the router's HTTP API; None without an HTTP client.
        single_process_token_ids: What one process answers.
    """

    question: RecallQuestion
    completion: Completion
    routed_text: str | None
    single_process_token_ids: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the pair and the single process agree in every token."""
        return self.completion.token_ids == self.single_process_token_ids

    @property
    def is_equal_through_router(self) -> bool | None:
        """Whether the router hands on the same words; None if it was not asked."""
        if self.routed_text is None:
            return None
        return self.routed_text.split() == (self.completion.text or "").split()

    @property
    def is_recalled(self) -> bool:
        """Whether all words of the fact are right."""
        return (self.completion.text or "").split() == self.question.answer.split()


def run(console: Console) -> int:
    """Runs the demo; returns the exit status."""
    questions = [
        question
        for seed, num_words in enumerate(CONTEXT_WORDS, start=_SEED)
        for question in recall_questions(
            num_words=num_words,
            num_facts=NUM_FACTS,
            num_questions=QUESTIONS_PER_CONTEXT,
            seed=seed,
        )
    ]
    started_at = monotonic()
    try:
        with Launcher(LaunchSettings(model_dir=default_model_dir(), router=True)) as launcher:
            services = launcher.start()
            console.print(
                f"prefill {services.prefill[0]}, decode {services.decode[0]} and "
                f"router {services.router} ready in {monotonic() - started_at:.1f} s"
            )
            with Client(services.decode[0]) as client:
                completions = [_ask(client, question, console) for question in questions]
            routed = _ask_router(services.router, questions, console)
    except (LauncherError, HttpError) as error:
        console.print(f"the demo failed: {error}", markup=False)
        return 1
    truths = _ask_single_process(questions)
    answers = [
        Answer(
            question=question,
            completion=completion,
            routed_text=text,
            single_process_token_ids=truth,
        )
        for question, completion, text, truth in zip(
            questions, completions, routed, truths, strict=True
        )
    ]
    console.print(_table(answers))
    return _verdict(answers, console)


def _ask(client: Client, question: RecallQuestion, console: Console) -> Completion:
    """Streams one answer to the console."""
    name = question.prompt.rsplit(" ", 1)[1]
    console.print(f"{question.num_words:>5} words ... ? {name} ->", end="")
    with client.generate(question.prompt, max_tokens=NUM_ANSWER_WORDS) as generation:
        for piece in generation:
            console.print(piece.text, end="", style="bold", markup=False)
        console.print()
        return generation.completion


def _ask_router(
    router: str, questions: Sequence[RecallQuestion], console: Console
) -> list[str | None]:
    """Asks through the router's OpenAI API, each question in the next way of all."""
    clients, missing = installed_clients(router)
    console.print("the same questions through the router's OpenAI API:")
    for name in missing:
        console.print(f"[yellow]not here, so not shown:[/yellow] {name}")
    if not clients:
        return [None] * len(questions)
    ways = itertools.cycle(all_ways(clients))
    return [
        _ask_http(clients[way.client], question, way, console)
        for question, way in zip(questions, ways, strict=False)
    ]


def _ask_http(client: HttpClient, question: RecallQuestion, way: Way, console: Console) -> str:
    """Asks in one way; the answer is shown as it comes."""
    context, name = question.prompt.split(" ? ")
    ask = Ask(
        model=default_model_dir().name,
        prompt=question.prompt,
        # The model's chat template puts <bos> before them and makes the same prompt of both.
        messages=[("system", context.removeprefix("<bos> ")), ("user", f"? {name}")],
        max_tokens=NUM_ANSWER_WORDS,
    )
    console.print(f"{question.num_words:>5} words, {way!s:<28} ? {name} ->", end=" ")
    pieces: list[str] = []
    for piece in client.pieces(ask, way):
        console.print(piece, end="", style="bold", markup=False)
        pieces.append(piece)
    console.print()
    return "".join(pieces)


def _ask_single_process(questions: Sequence[RecallQuestion]) -> list[tuple[int, ...]]:
    """Answers of one process that runs the same model without services or transfer."""
    # torch loads here, after the streamed answers: it takes over a second.
    import torch

    from serving_core.model.loading import load_model
    from serving_core.request import SamplingParams
    from serving_core.tokenizer import Tokenizer
    from tandem.single_process import SingleProcessEngine

    # The model is so small that a second thread costs more than it gives.
    torch.set_num_threads(1)
    num_blocks = -(-(max(CONTEXT_WORDS) + NUM_ANSWER_WORDS) // _BLOCK_SIZE)
    engine = SingleProcessEngine(
        load_model(default_model_dir()), num_blocks, _BLOCK_SIZE, _CHUNK_TOKENS
    )
    tokenizer = Tokenizer.from_dir(default_model_dir())
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER_WORDS)
    return [
        tuple(engine.generate(tokenizer.encode(question.prompt), greedy)) for question in questions
    ]


def _table(answers: Sequence[Answer]) -> Table:
    table = Table(title="The pair against a single process", title_justify="left")
    for heading in ("words", "answer", "expected", "recalled", "= single", "= router"):
        table.add_column(heading, no_wrap=True)
    for heading in ("TTFT ms", "TPOT ms", "KB pushed", "exposed ms"):
        table.add_column(heading, justify="right")
    for answer in answers:
        timings = answer.completion.timings
        pushed = timings.num_pushed_bytes
        table.add_row(
            str(answer.question.num_words),
            (answer.completion.text or "").strip(),
            answer.question.answer,
            _yes_or_no(answer.is_recalled),
            _yes_or_no(answer.is_equal),
            _yes_or_no(answer.is_equal_through_router),
            _milliseconds(timings.ttft_s),
            _milliseconds(timings.tpot_s),
            "-" if pushed is None else f"{pushed / 1000:.0f}",
            _milliseconds(timings.exposed_transfer_s),
        )
    return table


def _verdict(answers: Sequence[Answer], console: Console) -> int:
    num_equal = sum(answer.is_equal for answer in answers)
    routed = [answer for answer in answers if answer.is_equal_through_router is not None]
    num_routed = sum(bool(answer.is_equal_through_router) for answer in routed)
    num_recalled = sum(answer.is_recalled for answer in answers)
    console.print(
        f"{num_equal} of {len(answers)} answers equal the single process in every token; "
        f"{num_routed} of {len(routed)} asked through the router are the same; "
        f"{num_recalled} facts recalled"
    )
    is_equal = num_equal == len(answers) and num_routed == len(routed)
    is_good = is_equal and num_recalled >= MIN_RECALL * len(answers)
    console.print("[green]demo passed[/green]" if is_good else "[red]demo FAILED[/red]")
    return 0 if is_good else 1


def _yes_or_no(value: bool | None) -> str:
    if value is None:
        return "-"
    return "yes" if value else "[red]NO[/red]"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def main() -> None:
    """Entry point."""
    sys.exit(run(Console(highlight=False, width=None if sys.stdout.isatty() else 130)))


if __name__ == "__main__":
    main()
