"""What every transfer engine promises, by one suite over all of them."""

import dataclasses
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from kv_transfer.engine.base import (
    MAX_BYTES_BETWEEN_CHECKS,
    TargetMemory,
    WriterLink,
    WriterState,
    digest_rows,
)
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerDeadError,
    PeerRefusedError,
    TargetAllocationError,
    TargetBoundsError,
    WriteStoppedError,
)
from kv_transfer.spans import ByteSpan
from tests.support.processes import wait_until
from tests.support.transfer_harness import (
    EngineHarness,
    LoopbackHarness,
    MooncakeHarness,
    ShmHarness,
    SourceBytes,
)

MIB = 1 << 20
SIZE = 8 * MIB
CONNECT_S = 10.0


def never() -> bool:
    return False


@pytest.fixture(params=["loopback", "shm", "mooncake"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> EngineHarness:
    if request.param == "loopback":
        return LoopbackHarness()
    if request.param == "mooncake":
        return MooncakeHarness()
    return ShmHarness(tmp_path / "kv")


@pytest.fixture
def target(harness: EngineHarness) -> Iterator[TargetMemory]:
    memory = harness.target_engine.create_target(SIZE)
    yield memory
    memory.close()


@pytest.fixture
def link(harness: EngineHarness, target: TargetMemory) -> Iterator[WriterLink]:
    connected = harness.writer_engine.connect(target.descriptor, "prefill-1", CONNECT_S)
    yield connected
    connected.close()


@pytest.fixture(scope="module")
def source() -> SourceBytes:
    return SourceBytes(random.Random(7).randbytes(SIZE))


def test_target_new_is_whole_and_writable(target: TargetMemory) -> None:
    assert len(target.buffer) == SIZE
    assert target.descriptor.size_bytes == SIZE
    target.buffer[SIZE - 1] = 7
    assert target.buffer[SIZE - 1] == 7
    assert target.address % 4096 == 0


def test_write_many_sizes_lands_them_and_returns_the_digest_of_the_source(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    rng = random.Random(1)
    sizes = [1, 2, 63, 1024, 4096, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 3 * MIB // 2]
    rng.shuffle(sizes)
    offset, copies, expected = 5, [], bytearray(SIZE)
    sent = xxhash.xxh3_64()
    for size in sizes:
        start = rng.randrange(SIZE - size)
        piece = source.content[start : start + size]
        copies.append(source.span(start, offset, size))
        expected[offset : offset + size] = piece
        sent.update(piece)
        offset += size + rng.randrange(3)
    digest = link.write(copies, never)
    assert digest == sent.intdigest()
    assert target.buffer == expected
    spans = [ByteSpan(copy.target_offset, copy.num_bytes) for copy in copies]
    assert digest_rows(target.buffer, spans) == digest


def test_write_flipped_byte_in_the_target_changes_its_digest(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    digest = link.write([source.span(0, 0, 1000)], never)
    target.buffer[999] ^= 1
    assert digest_rows(target.buffer, [ByteSpan(0, 1000)]) != digest


def test_write_nothing_returns_the_digest_of_nothing(link: WriterLink) -> None:
    assert link.write([], never) == xxhash.xxh3_64_intdigest(b"")


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(-1, 10), (SIZE, 1), (SIZE - 5, 6), (0, 0), (0, -1), (0, SIZE + 1), (1 << 62, 1)],
)
def test_write_span_outside_is_refused_before_the_first_byte(
    target: TargetMemory, link: WriterLink, source: SourceBytes, offset: int, num_bytes: int
) -> None:
    with pytest.raises(TargetBoundsError):
        link.write([source.span(0, 0, 100), source.span(0, offset, num_bytes)], never)
    assert not any(target.buffer[:200])
    assert not any(target.buffer[-200:])


def test_write_stopped_from_the_start_writes_nothing(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    with pytest.raises(WriteStoppedError):
        link.write([source.span(0, 0, 1)], lambda: True)
    assert target.buffer[0] == 0


@pytest.mark.parametrize("span_bytes", [1024, 60000, MIB, 3 * MIB])
def test_write_stopped_midway_writes_at_most_one_piece_more(
    harness: EngineHarness,
    target: TargetMemory,
    link: WriterLink,
    source: SourceBytes,
    span_bytes: int,
) -> None:
    num_spans = 6 * MIB // span_bytes
    copies = [source.span(i * span_bytes, i * span_bytes, span_bytes) for i in range(num_spans)]
    seen_at_stop: list[int] = []

    def stop_in_the_third_piece() -> bool:
        seen_at_stop.append(_num_written(target, source))
        return len(seen_at_stop) > 2

    with pytest.raises(WriteStoppedError):
        link.write(copies, stop_in_the_third_piece)
    assert seen_at_stop[0] == 0
    for before, after in itertools.pairwise(seen_at_stop):
        assert 0 <= after - before <= harness.max_bytes_in_flight
    # What was handed over before the stop is all that there is.
    written_in_the_end = _num_written(target, source)
    assert 0 < written_in_the_end <= seen_at_stop[-1] + harness.max_bytes_in_flight
    assert written_in_the_end <= 2 * MAX_BYTES_BETWEEN_CHECKS


def _num_written(target: TargetMemory, source: SourceBytes) -> int:
    """Length of the prefix of the target that equals the source, found by bisection."""
    low, high = 0, SIZE
    while low < high:
        middle = (low + high + 1) // 2
        if target.buffer[low:middle] == source.content[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def test_write_by_two_threads_lands_both(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    half = SIZE // 2
    digests: dict[int, int] = {}

    def push(start: int) -> None:
        copies = [source.span(start + i, start + i, 4096) for i in range(0, half, 4096)]
        digests[start] = link.write(copies, never)

    threads = [threading.Thread(target=push, args=(start,)) for start in (0, half)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert target.buffer == source.content
    assert digests[half] == xxhash.xxh3_64_intdigest(source.content[half:])


def test_connect_wrong_key_is_refused(harness: EngineHarness, target: TargetMemory) -> None:
    wrong = dataclasses.replace(target.descriptor, access_key=bytes(32))
    with pytest.raises(PeerRefusedError):
        harness.writer_engine.connect(wrong, "prefill-1", CONNECT_S)
    assert target.writer_state("prefill-1") is WriterState.UNKNOWN


def test_connect_wrong_size_is_refused(harness: EngineHarness, target: TargetMemory) -> None:
    wrong = dataclasses.replace(target.descriptor, size_bytes=SIZE * 2)
    with pytest.raises(PeerRefusedError):
        harness.writer_engine.connect(wrong, "prefill-1", CONNECT_S)


def test_connect_other_engines_descriptor_is_refused(
    harness: EngineHarness, target: TargetMemory
) -> None:
    wrong = dataclasses.replace(target.descriptor, engine="carrier pigeon")
    with pytest.raises(EngineConfigError, match="carrier pigeon"):
        harness.writer_engine.connect(wrong, "prefill-1", CONNECT_S)


def test_connect_closed_target_is_an_error_that_a_retry_may_heal(harness: EngineHarness) -> None:
    target = harness.target_engine.create_target(4096)
    descriptor = target.descriptor
    target.close()
    with pytest.raises(ConnectError) as caught:
        harness.writer_engine.connect(descriptor, "prefill-1", CONNECT_S)
    assert caught.value.retryable


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_create_target_of_no_size_is_refused(harness: EngineHarness, num_bytes: int) -> None:
    with pytest.raises(EngineConfigError):
        harness.target_engine.create_target(num_bytes)


def test_create_target_larger_than_the_machine_is_refused(harness: EngineHarness) -> None:
    with pytest.raises(TargetAllocationError):
        harness.target_engine.create_target(1 << 56)


def test_descriptor_printed_hides_the_key(target: TargetMemory) -> None:
    assert "access_key" not in repr(target.descriptor)
    assert target.descriptor.access_key.hex() not in repr(target.descriptor)


def test_target_closed_is_a_dead_peer(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    assert not link.peer_is_dead()
    target.close()
    assert link.peer_is_dead()
    with pytest.raises(PeerDeadError):
        link.write([source.span(0, 0, 1)], never)


def test_close_twice_is_harmless(target: TargetMemory, link: WriterLink) -> None:
    link.close()
    link.close()
    target.close()
    target.close()


def test_link_closed_refuses_writes(link: WriterLink, source: SourceBytes) -> None:
    link.close()
    with pytest.raises(WriteStoppedError):
        link.write([source.span(0, 0, 1)], never)


def test_link_close_during_a_write_ends_it_first(
    target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    is_writing, may_go_on = threading.Event(), threading.Event()
    events: list[str] = []

    def hold() -> bool:
        is_writing.set()
        assert may_go_on.wait(10)
        return False

    def push() -> None:
        with pytest.raises(WriteStoppedError):
            link.write([source.span(0, 0, 2 * MIB)], hold)
        events.append("write ended")

    def close() -> None:
        link.close()
        events.append("link closed")

    writer, closer = threading.Thread(target=push), threading.Thread(target=close)
    writer.start()
    assert is_writing.wait(10)
    closer.start()
    wait_until(lambda: not link_accepts(link), timeout_s=10, what="the link closes")
    may_go_on.set()
    writer.join(10)
    closer.join(10)
    assert sorted(events) == ["link closed", "write ended"]
    assert not any(target.buffer[MIB : 2 * MIB])


def link_accepts(link: WriterLink) -> bool:
    """Whether a new write would be let in; an empty one asks without writing."""
    try:
        link.write([], never)
    except WriteStoppedError:
        return False
    return True


def test_writer_state_follows_the_process_and_not_the_connection(
    harness: EngineHarness, target: TargetMemory
) -> None:
    assert target.writer_state("prefill-1") is WriterState.UNKNOWN
    writer = harness.start_writer(target.descriptor, "prefill-1")
    try:
        assert target.writer_state("prefill-1") is WriterState.ALIVE
        assert target.writer_state("prefill-2") is WriterState.UNKNOWN
    finally:
        writer.kill()
    assert target.writer_state("prefill-1") is after_death(harness)


def after_death(harness: EngineHarness) -> WriterState:
    """What a target can know of a writer that was killed: without a proof it counts as alive."""
    return WriterState.DEAD if harness.target_engine.can_fence_writer else WriterState.ALIVE


def test_writer_state_after_disconnect_is_still_alive(
    target: TargetMemory, link: WriterLink
) -> None:
    link.close()
    assert target.writer_state("prefill-1") is WriterState.ALIVE


def test_writer_killed_leaves_the_others_working(
    harness: EngineHarness, target: TargetMemory, link: WriterLink, source: SourceBytes
) -> None:
    harness.start_writer(target.descriptor, "prefill-2").kill()
    assert target.writer_state("prefill-2") is after_death(harness)
    assert target.writer_state("prefill-1") is WriterState.ALIVE
    link.write([source.span(0, 0, 10)], never)
    assert target.buffer[:10] == source.content[:10]


def test_target_closed_keeps_memory_that_is_still_looked_at(harness: EngineHarness) -> None:
    target = harness.target_engine.create_target(4096)
    view = memoryview(target.buffer)
    view[0] = 9
    target.close()
    assert view[0] == 9
    view[4095] = 1


def test_engine_used_many_times_leaks_no_descriptor_and_no_thread(
    harness: EngineHarness, source: SourceBytes
) -> None:
    def once() -> None:
        target = harness.target_engine.create_target(4096)
        for number in range(3):
            link = harness.writer_engine.connect(target.descriptor, f"prefill-{number}", CONNECT_S)
            link.write([source.span(0, 0, 4096)], never)
            with pytest.raises(PeerRefusedError):
                harness.writer_engine.connect(
                    dataclasses.replace(target.descriptor, access_key=bytes(32)), "x", 2.0
                )
            link.close()
        target.close()

    once()
    before = _open_things()
    for _ in range(10):
        once()
    assert _open_things() == before


def _open_things() -> tuple[int, int, int]:
    with open("/proc/self/maps", encoding="ascii") as maps:
        num_mappings = sum("tandem-kv" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), num_mappings


def test_should_stop_is_asked_before_every_piece(link: WriterLink, source: SourceBytes) -> None:
    asked: list[None] = []

    def count() -> bool:
        asked.append(None)
        return False

    link.write([source.span(0, 0, 4 * MIB)], count)
    assert len(asked) >= 4
