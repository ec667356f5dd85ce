"""The buffer between the batch and a client, and what fills it."""

from __future__ import annotations

import asyncio

import pytest

from decode_service.request_output import RequestOutput, TextStops
from decode_service.stop_rule import FinishReason
from decode_service.token_stream import Finish, TokenStream
from serving_core.errors import ComputeError, OverloadedError, RequestCancelledError
from serving_core.stop_matcher import StopMatcher


def make_stream(max_unread_tokens: int = 4) -> TokenStream:
    """A stream with a small bound."""
    return TokenStream(max_unread_tokens=max_unread_tokens, retry_after_s=1.5)


class LetterDetokenizer:
    """Token n is the n-th letter of the alphabet."""

    def push(self, token_ids: list[int]) -> str:
        """Letters of the tokens."""
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def make_output(stream: TokenStream, *stop: str, min_tokens: int = 0) -> RequestOutput:
    """An output that watches for stop strings over letters."""
    stops = TextStops(
        detokenizer=LetterDetokenizer(),  # type: ignore[arg-type]  # all that is called of it
        matcher=StopMatcher(stop),
        min_tokens=min_tokens,
    )
    return RequestOutput(stream=stream, text_stops=stops)


async def test_stream_lagging_reader_gets_waiting_tokens_at_once() -> None:
    stream = make_stream()
    for token_id in (1, 2, 3):
        assert stream.put(token_id)
    delta = await stream.next_delta()
    assert (delta.token_ids, delta.finish) == ((1, 2, 3), None)


async def test_stream_reader_waits_for_a_token() -> None:
    stream = make_stream()
    reading = asyncio.create_task(stream.next_delta())
    await asyncio.sleep(0)
    assert not reading.done()
    stream.put(9)
    assert (await reading).token_ids == (9,)


async def test_stream_beyond_bound_ends_with_overload_and_retry_delay() -> None:
    stream = make_stream(2)
    assert stream.put(1)
    assert stream.put(2)
    assert not stream.put(3)
    assert not stream.is_open
    with pytest.raises(OverloadedError, match="limit is 2") as caught:
        await stream.next_delta()
    assert caught.value.retry_after_s == 1.5


async def test_stream_first_end_counts_and_unread_tokens_come_before_it() -> None:
    stream = make_stream()
    stream.put(1)
    finish = Finish(reason=FinishReason.LENGTH)
    stream.finish(finish)
    stream.fail(RequestCancelledError("too late"))
    delta = await stream.next_delta()
    assert (delta.token_ids, delta.finish) == ((1,), finish)
    assert stream.end_reason == "length"


async def test_stream_failure_drops_unread_tokens() -> None:
    stream = make_stream()
    stream.put(1)
    stream.fail(ComputeError("a step raised"))
    with pytest.raises(ComputeError):
        await stream.next_delta()


async def test_all_tokens_waits_for_the_end() -> None:
    stream = make_stream()
    stream.put(1)
    reading = asyncio.create_task(stream.all_tokens())
    await asyncio.sleep(0)
    assert not reading.done()
    stream.put(2)
    stream.finish(Finish(reason=FinishReason.STOP))
    assert (await reading).token_ids == (1, 2)


async def test_output_stop_string_across_tokens_ends_with_its_last_token() -> None:
    stream = make_stream(16)
    output = make_output(stream, "cd")
    assert output.take(1, None)
    assert output.take(2, None)
    assert not output.take(3, None)
    assert not output.take(4, None)  # what the batch computed meanwhile is dropped
    delta = await stream.next_delta()
    assert delta.token_ids == (1, 2, 3)
    assert delta.finish == Finish(reason=FinishReason.STOP, matched_stop="cd")
    assert output.num_tokens == 3


async def test_output_stop_string_below_min_tokens_does_not_match() -> None:
    stream = make_stream(16)
    output = make_output(stream, "b", min_tokens=2)
    assert [output.take(token_id, None) for token_id in (1, 1, 1)] == [True, True, False]


async def test_output_stop_string_in_last_allowed_token_is_a_stop() -> None:
    stream = make_stream(16)
    output = make_output(stream, "b")
    assert not output.take(1, FinishReason.LENGTH)
    assert (await stream.next_delta()).finish == Finish(reason=FinishReason.STOP, matched_stop="b")


async def test_output_stop_token_is_named() -> None:
    stream = make_stream(16)
    output = RequestOutput(stream=stream, text_stops=None)
    assert not output.take(2, FinishReason.STOP)
    assert (await stream.next_delta()).finish == Finish(
        reason=FinishReason.STOP, matched_token_id=2
    )
