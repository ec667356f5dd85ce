"""HTTP clients of the router that go away in each phase leave both pools whole within a second.

The router cancels its call to decode or sends Abort, depending on how far the answer is; prefill
hears of it from decode. Slow writes make the phases of the hand-off long enough to be hit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.default_model import default_model_dir
from tests.support.cluster import Cluster, ClusterSettings, decode_load, running_cluster
from tests.support.fault_plan import FaultPlan
from tests.support.processes import prefill_pool_is_whole, prefill_status, wait_until
from tests.support.recall_truth import MODEL_NAME, KnownAnswer, known_answers
from tests.support.router_load import (
    End,
    Reply,
    ask,
    completion_body,
    open_completion,
    read_texts,
)

NUM_ANSWER_TOKENS = 16
# Long enough that no answer of that length ends while a test looks at it.
MANY_TOKENS = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
either_way = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def long() -> KnownAnswer:
    """A prompt of many chunks."""
    [answer] = known_answers(num_questions=1, num_words=250, max_tokens=NUM_ANSWER_TOKENS)
    return answer


@pytest.fixture(scope="module")
def short() -> KnownAnswer:
    """A prompt of one chunk."""
    [answer] = known_answers(num_questions=1, num_words=30, max_tokens=NUM_ANSWER_TOKENS)
    return answer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill that takes one job at a time, one decode with 1,024 rows, and the router."""
    settings = ClusterSettings(
        model_dir=default_model_dir(),
        num_prefill=1,
        num_decode=1,
        chunk_tokens=32,
        num_kv_blocks=64,
        max_num_seqs=1,
        prefill_module="tests.support.faulty_prefill",
        prefill_env=FaultPlan(write_delay_s=0.03).to_env(),
    )
    with running_cluster(settings, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster, short: KnownAnswer) -> Iterator[Cluster]:
    """The cluster; after the test it must still give the right answer."""
    yield shared
    shared.wait_pools_whole(1.0)
    after = ask(shared.router.address, body_of(short, stream=True), Reply(name="after", question=0))
    assert after.end is End.COMPLETE, after
    assert after.words == short.words
    assert shared.errors_in_logs() == []


def body_of(known: KnownAnswer, **fields: Any) -> dict[str, Any]:
    """Asks for the known answer."""
    return completion_body(MODEL_NAME, known.prompt, NUM_ANSWER_TOKENS, **fields)


def endless_body(**fields: Any) -> dict[str, Any]:
    """Asks for an answer that a client will not wait for, after a prompt of one chunk."""
    return completion_body(MODEL_NAME, "<bos> alice river stone", MANY_TOKENS, **fields)


def is_pushing(cluster: Cluster, num_bytes_before: int) -> bool:
    """Whether bytes of a job that still runs have left."""
    status = prefill_status(cluster.prefill[0].address)
    return status.num_active_jobs > 0 and status.num_pushed_bytes > num_bytes_before


def num_pushed_bytes(cluster: Cluster) -> int:
    """Bytes that have ever left."""
    return prefill_status(cluster.prefill[0].address).num_pushed_bytes


def num_queued(cluster: Cluster) -> int:
    """Jobs that wait on prefill."""
    return prefill_status(cluster.prefill[0].address).num_queued_jobs


def num_open(cluster: Cluster) -> int:
    """Requests that decode has not ended."""
    return decode_load(cluster.decode[0].address).num_total_reqs


def num_running(cluster: Cluster) -> int:
    """Requests that decode generates for."""
    return decode_load(cluster.decode[0].address).num_running_reqs


@either_way
def test_disconnect_while_pushing_frees_both_pools(
    cluster: Cluster, long: KnownAnswer, stream: bool
) -> None:
    before = num_pushed_bytes(cluster)
    with open_completion(cluster.router.address, body_of(long, stream=stream), "pushing"):
        wait_until(lambda: is_pushing(cluster, before), timeout_s=10, what="the push runs")
        assert not cluster.pools_are_whole()
    cluster.wait_pools_whole(1.0)


@either_way
def test_disconnect_while_queued_on_prefill_takes_the_job_out_of_the_queue(
    cluster: Cluster, long: KnownAnswer, stream: bool
) -> None:
    before = num_pushed_bytes(cluster)
    address, body = cluster.router.address, body_of(long, stream=stream)
    with open_completion(address, body, "first"):
        wait_until(lambda: is_pushing(cluster, before), timeout_s=10, what="the push runs")
        with open_completion(address, body, "queued"):
            wait_until(lambda: num_queued(cluster) == 1, timeout_s=10, what="one queues")
        wait_until(lambda: num_queued(cluster) == 0, timeout_s=1.0, what="the queue is empty")
        wait_until(lambda: num_open(cluster) == 1, timeout_s=1.0, what="decode has one request")
    cluster.wait_pools_whole(1.0)


@either_way
def test_disconnect_while_waiting_for_decode_blocks_frees_prefill_blocks(
    cluster: Cluster, long: KnownAnswer, stream: bool
) -> None:
    """Prefill holds blocks for the prompt and waits for the grant; nothing is written yet."""
    router, prefill = cluster.router.address, cluster.prefill[0].address
    with open_completion(router, endless_body(), "holder") as holder:
        read_texts(holder, 1)
        wait_until(lambda: prefill_pool_is_whole(prefill), timeout_s=5, what="prefill is done")
        before = num_pushed_bytes(cluster)
        with open_completion(router, body_of(long, stream=stream), "waiting"):
            wait_until(
                lambda: not prefill_pool_is_whole(prefill), timeout_s=5, what="prefill holds blocks"
            )
            assert num_open(cluster) == 2
        wait_until(lambda: prefill_pool_is_whole(prefill), timeout_s=1.0, what="prefill is whole")
        wait_until(lambda: num_open(cluster) == 1, timeout_s=1.0, what="decode has one request")
        assert num_pushed_bytes(cluster) == before
    cluster.wait_pools_whole(1.0)


@pytest.mark.parametrize("num_texts", [1, 20])
def test_disconnect_in_mid_stream_frees_both_pools(cluster: Cluster, num_texts: int) -> None:
    with open_completion(cluster.router.address, endless_body(), "streaming") as connection:
        read_texts(connection, num_texts)
        assert num_open(cluster) == 1
    cluster.wait_pools_whole(1.0)


def test_disconnect_while_an_answer_that_is_not_streamed_is_generated_frees_both_pools(
    cluster: Cluster,
) -> None:
    with open_completion(cluster.router.address, endless_body(stream=False), "whole"):
        wait_until(lambda: num_running(cluster) == 1, timeout_s=10, what="decode generates")
    cluster.wait_pools_whole(1.0)


def test_disconnect_between_two_tokens_of_a_stopped_decode_reaches_it_when_it_goes_on(
    cluster: Cluster,
) -> None:
    decode = cluster.decode[0]
    with open_completion(cluster.router.address, endless_body(), "stopped") as connection:
        read_texts(connection, 1)
        assert num_open(cluster) == 1
        decode.signal(signal.SIGSTOP)
    decode.signal(signal.SIGCONT)
    cluster.wait_pools_whole(1.0)
