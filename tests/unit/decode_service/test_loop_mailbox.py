"""From the compute thread to the loop; tokens per second; timings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

from decode_service.handoff import LandedKv
from decode_service.loop_mailbox import LoopMailbox
from decode_service.throughput import ThroughputMeter
from decode_service.timings import RequestTimings
from tests.support.eventually import until


async def test_mailbox_keeps_order_and_delivers_on_the_loop() -> None:
    batches: list[Sequence[int]] = []
    threads: set[int] = set()

    def take(items: Sequence[int]) -> None:
        batches.append(items)
        threads.add(threading.get_ident())

    mailbox = LoopMailbox(asyncio.get_running_loop(), take)

    def send() -> None:
        mailbox.post([])
        for number in range(200):
            mailbox.post([number, number])

    await asyncio.to_thread(send)
    await until(lambda: sum(map(len, batches)) == 400)
    assert [item for batch in batches for item in batch] == [n // 2 for n in range(400)]
    assert threads == {threading.get_ident()}


async def test_mailbox_posts_before_the_loop_turns_arrive_together() -> None:
    batches: list[list[int]] = []
    mailbox = LoopMailbox(asyncio.get_running_loop(), lambda items: batches.append(list(items)))
    mailbox.post([1])
    mailbox.post([2, 3])
    await until(lambda: bool(batches))
    assert batches == [[1, 2, 3]]


def test_throughput_averages_the_last_ten_seconds() -> None:
    now_s = 100.0
    meter = ThroughputMeter(lambda: now_s)
    meter.add(30)
    meter.add(20)
    assert meter.tokens_per_s() == 5.0
    now_s = 105.0
    meter.add(10)
    assert meter.tokens_per_s() == 6.0
    now_s = 110.0
    assert meter.tokens_per_s() == 1.0
    now_s = 200.0
    assert meter.tokens_per_s() == 0.0


def test_timings_leave_out_what_is_not_known() -> None:
    timings = RequestTimings(arrived_s=10.0)
    assert json.loads(timings.to_json(now_s=12.0, num_output_tokens=0)) == {"e2e_s": 2.0}


def test_timings_divide_decoding_by_the_later_tokens() -> None:
    landed = LandedKv(
        ticket_id=b"", block_ids=(), first_token_id=1, num_cached_tokens=0, pushed_bytes=64,
        queue_time_s=0.25, compute_time_s=0.5, exposed_transfer_s=0.125,
    )  # fmt: skip
    timings = RequestTimings(arrived_s=10.0, first_token_s=11.0, last_token_s=13.0, landed=landed)
    assert json.loads(timings.to_json(now_s=14.0, num_output_tokens=5)) == {
        "ttft_s": 1.0,
        "tpot_s": 0.5,
        "e2e_s": 4.0,
        "prefill_queue_s": 0.25,
        "prefill_compute_s": 0.5,
        "exposed_transfer_s": 0.125,
        "num_pushed_bytes": 64,
    }
