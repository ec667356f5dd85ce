"""The outbox of a stream: order, batching, bounds and the two ways to end."""

import asyncio

import pytest

from prefill_service.outbox import MAX_RECEIPTS_PER_MESSAGE, Outbox
from tandem.v1 import handoff_pb2
from tandem.v1 import prefill_service_pb2 as pb

FIRST = pb.PrefillResponse(first=pb.First(token_ids=[5]))
FAILED = pb.PrefillResponse(failed=pb.Failed())


def receipt(layer: int) -> handoff_pb2.Receipt:
    return handoff_pb2.Receipt(layer=layer)


async def test_receipts_that_wait_together_leave_together_and_keep_their_order() -> None:
    outbox = Outbox(capacity=10)
    for layer in range(3):
        assert outbox.put_receipt(receipt(layer))
    outbox.put(FIRST)
    assert outbox.put_receipt(receipt(3))
    outbox.close()
    first = await outbox.next_message()
    assert first is not None
    assert [r.layer for r in first.progress.receipts] == [0, 1, 2]
    assert await outbox.next_message() == FIRST
    last = await outbox.next_message()
    assert last is not None
    assert [r.layer for r in last.progress.receipts] == [3]
    assert await outbox.next_message() is None
    assert await outbox.next_message() is None


async def test_one_message_holds_a_bounded_number_of_receipts() -> None:
    outbox = Outbox(capacity=2 * MAX_RECEIPTS_PER_MESSAGE)
    for layer in range(MAX_RECEIPTS_PER_MESSAGE + 1):
        assert outbox.put_receipt(receipt(layer))
    sizes = []
    for _ in range(2):
        message = await outbox.next_message()
        assert message is not None
        assert message.ByteSize() < 2**20
        sizes.append(len(message.progress.receipts))
    assert sizes == [MAX_RECEIPTS_PER_MESSAGE, 1]


async def test_receipt_beyond_the_capacity_is_refused_and_the_last_message_is_not() -> None:
    outbox = Outbox(capacity=2)
    assert outbox.put_receipt(receipt(0))
    assert outbox.put_receipt(receipt(1))
    assert not outbox.put_receipt(receipt(2))
    outbox.put(FAILED)
    outbox.close()
    await outbox.next_message()
    assert await outbox.next_message() == FAILED


async def test_reader_that_waits_is_woken_by_a_message() -> None:
    outbox = Outbox(capacity=2)
    waiting = asyncio.create_task(outbox.next_message())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(FIRST)
    assert await waiting == FIRST


async def test_fail_raises_at_once_and_drops_what_waits() -> None:
    outbox = Outbox(capacity=2)
    waiting = asyncio.create_task(outbox.next_message())
    await asyncio.sleep(0)
    outbox.put(FIRST)
    outbox.fail(RuntimeError("not quiet"))
    with pytest.raises(RuntimeError, match="not quiet"):
        await waiting
    assert len(outbox) == 0


async def test_first_end_counts() -> None:
    closed = Outbox(capacity=1)
    closed.close()
    closed.fail(RuntimeError("too late"))
    closed.put(FIRST)
    assert await closed.next_message() is None
    failed = Outbox(capacity=1)
    failed.fail(RuntimeError("first"))
    failed.close()
    with pytest.raises(RuntimeError, match="first"):
        await failed.next_message()
