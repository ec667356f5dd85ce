"""The asynchronous client against a scripted service over real gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest

from serving_core.errors import InvalidRequestError
from serving_core.rpc.status import to_rpc_status
from serving_core.tokenizer import Tokenizer
from tandem import AsyncClient, InvalidInputError, UnavailableError, default_model_dir
from tests.support.fake_engine import FakeEngine, Responses, answer, chunk, complete, serving

WAIT_S = 10.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer_zip=Tokenizer.from_dir(default_model_dir()).files_zip())


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


async def test_async_generate_yields_pieces_and_the_whole(engine: FakeEngine, address: str) -> None:
    engine.script = answer(chunk(10), chunk(11, 12), complete(3, finish_reason="stop"))
    async with AsyncClient(address) as client:
        generation = await client.generate([1], max_tokens=3)
        pieces = [piece.token_ids async for piece in generation]
    assert pieces == [(10,), (11, 12)]
    assert generation.completion.token_ids == (10, 11, 12)
    assert generation.completion.finish_reason == "stop"
    assert generation.completion.timings.num_pushed_bytes == 4096
    assert generation.completion.text is not None


async def test_async_complete_runs_many_at_once(engine: FakeEngine, address: str) -> None:
    """All calls are open at the same time, or none would end."""
    all_open = threading.Barrier(4)

    def script(_: object, context: grpc.ServicerContext) -> Responses:
        all_open.wait(WAIT_S)
        yield chunk(10)
        yield complete(1)

    engine.script = script
    async with AsyncClient(address) as client:
        completions = await asyncio.gather(*(client.complete([1]) for _ in range(4)))
    assert [completion.token_ids for completion in completions] == [(10,)] * 4
    assert engine.num_tokenizer_calls == 1


async def test_async_complete_service_refuses_raises_the_typed_error(
    engine: FakeEngine, address: str
) -> None:
    def script(_: object, context: grpc.ServicerContext) -> Responses:
        context.abort_with_status(to_rpc_status(InvalidRequestError("prompt", 0, "not empty")))
        yield from ()

    engine.script = script
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidInputError) as caught:
            await client.complete([])
    assert (caught.value.field, caught.value.limit) == ("prompt", "not empty")


async def test_async_generation_closed_early_cancels_on_the_service(
    engine: FakeEngine, address: str
) -> None:
    def script(_: object, context: grpc.ServicerContext) -> Responses:
        yield chunk(10)
        over = threading.Event()
        context.add_callback(over.set)
        over.wait(WAIT_S)

    engine.script = script
    async with AsyncClient(address) as client:
        async with await client.generate([1]) as generation:
            assert (await anext(generation)).token_ids == (10,)
        assert await asyncio.to_thread(engine.ended.wait, WAIT_S)


async def test_async_client_without_tokenizer_has_no_text(engine: FakeEngine, address: str) -> None:
    engine.tokenizer_zip = None
    engine.script = answer(chunk(10), complete(1))
    async with AsyncClient(address) as client:
        assert (await client.complete([1])).text is None


async def test_async_client_nobody_listens_raises_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.complete([1])
        with pytest.raises(UnavailableError):
            await client.abort("mine")


async def test_async_client_abort_names_the_request(engine: FakeEngine, address: str) -> None:
    async with AsyncClient(address) as client:
        await client.abort("mine")
    assert engine.aborted == ["mine"]
