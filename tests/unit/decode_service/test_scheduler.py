"""Stop rules and the batch: pure ints."""

from __future__ import annotations

import pytest

from decode_service.scheduler import DecodeSequence, SequenceId, StepScheduler
from decode_service.stop_rule import FinishReason, StopRule
from serving_core.request import SamplingParams


def make_sequence(number: int, *, max_tokens: int = 8, min_tokens: int = 0) -> DecodeSequence:
    """A sequence of 10 prompt tokens that stops at token 2."""
    return DecodeSequence(
        sequence_id=SequenceId(number),
        num_prompt_tokens=10,
        block_ids=(number,),
        sampling=SamplingParams(),
        seed=0,
        stop_rule=StopRule(
            stop_token_ids=frozenset({2}), min_tokens=min_tokens, max_tokens=max_tokens
        ),
        last_token_id=5,
    )


def batch_ids(scheduler: StepScheduler) -> list[int]:
    """Ids in the next step."""
    return [sequence.sequence_id for sequence in scheduler.next_batch()]


@pytest.mark.parametrize(
    ("token_id", "num_output_tokens", "expected"),
    [
        (5, 1, None),
        (2, 4, FinishReason.STOP),
        (2, 3, None),  # the last token that min_tokens protects
        (5, 8, FinishReason.LENGTH),
        (2, 8, FinishReason.STOP),  # a stop in the last place is a stop
    ],
)
def test_stop_rule_token_and_length_give_the_reason(
    token_id: int, num_output_tokens: int, expected: FinishReason | None
) -> None:
    rule = StopRule(stop_token_ids=frozenset({2, 7}), min_tokens=3, max_tokens=8)
    assert rule.check(token_id, num_output_tokens) is expected


def test_stop_rule_below_min_tokens_bans_stop_ids() -> None:
    rule = StopRule(stop_token_ids=frozenset({7, 2}), min_tokens=3, max_tokens=8)
    assert [rule.banned_token_ids(n) for n in (0, 2, 3)] == [(2, 7), (2, 7), ()]


def test_sequence_positions_count_prompt_and_output() -> None:
    sequence = make_sequence(1)
    assert sequence.num_tokens == 11  # ten of the prompt and the one that prefill sampled
    assert sequence.append(6) is None
    assert (sequence.num_tokens, sequence.last_token_id) == (12, 6)
    assert sequence.append(2) is FinishReason.STOP


def test_scheduler_more_sequences_than_places_run_first_come_first_served() -> None:
    scheduler = StepScheduler(max_num_seqs=2)
    for number in (1, 2, 3):
        scheduler.join(make_sequence(number))
    assert batch_ids(scheduler) == [1, 2]
    assert (len(scheduler), scheduler.num_running) == (3, 2)
    assert scheduler.leave(SequenceId(1))
    assert batch_ids(scheduler) == [2, 3]


def test_scheduler_leave_twice_says_so() -> None:
    scheduler = StepScheduler(max_num_seqs=2)
    scheduler.join(make_sequence(1))
    assert scheduler.leave(SequenceId(1))
    assert not scheduler.leave(SequenceId(1))
    assert batch_ids(scheduler) == []
