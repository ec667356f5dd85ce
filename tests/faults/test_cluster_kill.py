"""Two prefill and two decode services behind the router, under load, and one process dies or goes.

Only answers that were streaming from a killed decode service may be lost, and their clients must be
told. Everything else is answered with a single process's words, answers that are not streamed among
it, and the process is used again by itself once it is back on its port.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import pytest

from tandem.default_model import default_model_dir
from tests.support.cluster import Cluster, ClusterSettings, running_cluster
from tests.support.processes import ServiceProcess, prefill_status, wait_until
from tests.support.recall_truth import MODEL_NAME, KnownAnswer, known_answers
from tests.support.router_load import End, Reply, SteadyLoad, completion_body

NUM_CLIENTS = 10
MAX_TOKENS = 64
# Requests under way when something happens, and answered by the others while it is gone.
NUM_STREAMING = 2
NUM_MEANWHILE = 15
NUM_AFTERWARDS = 5
MIN_SUCCESS = 0.99
# Measured: 0.5 to 2.6 s after the ready line. The router asks for health and loads every second.
BACK_IN_USE_S = 5.0
ROUTER_BACK_S = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def answers() -> list[KnownAnswer]:
    """What the clients ask, and the truth."""
    return known_answers(num_questions=6, num_words=200, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=["shm", "mooncake"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One cluster for all tests of this file; each leaves it as it found it."""
    settings = ClusterSettings(model_dir=default_model_dir(), engine=request.param)
    with running_cluster(settings, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def load(cluster: Cluster, answers: Sequence[KnownAnswer]) -> Iterator[SteadyLoad]:
    """A load that has come up, a third of it not streamed; in the end nothing is left of it."""
    bodies = [
        completion_body(MODEL_NAME, one.prompt, MAX_TOKENS, stream=index % 3 != 0)
        for index, one in enumerate(answers)
    ]
    steady = SteadyLoad(router=cluster.router.address, bodies=bodies, num_clients=NUM_CLIENTS)
    with steady:
        wait_complete(steady, 2 * len(bodies), what="the load runs")
        yield steady
    cluster.wait_pools_whole(1.0)
    assert cluster.errors_in_logs() == []


def wait_complete(load: SteadyLoad, number: int, *, what: str, worker: str = "") -> float:
    """Waits for that many complete answers to requests of from now on; returns the seconds."""
    now_s = monotonic()
    return wait_until(
        lambda: load.num_complete(sent_after_s=now_s, worker=worker) >= number,
        timeout_s=20.0,
        what=what,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Replies sorted by what they may be after a fault."""

    replies: Sequence[Reply]
    answers: Sequence[KnownAnswer]
    is_excused: Callable[[Reply], bool]

    def check(self) -> None:
        """No wrong word, nothing lost in silence, and hardly anything lost without excuse."""
        for reply in self.replies:
            truth = self.answers[reply.question].words
            assert reply.words == truth[: len(reply.words)], reply
            assert reply.end in (End.COMPLETE, End.REFUSED, End.BROKEN), reply
            if reply.end is End.COMPLETE:
                assert reply.words == truth, reply
                assert reply.finish_reason == "length", reply
        unexcused = [reply for reply in self.replies if not self.is_excused(reply)]
        lost = [reply for reply in unexcused if reply.end is not End.COMPLETE]
        assert len(unexcused) > NUM_MEANWHILE
        assert len(lost) <= (1 - MIN_SUCCESS) * len(unexcused), lost


def test_killed_decode_loses_only_what_it_was_streaming_and_is_used_again(
    cluster: Cluster, answers: Sequence[KnownAnswer], load: SteadyLoad
) -> None:
    target = cluster.decode[0]
    wait_until(
        lambda: load.num_streaming(target.address) >= NUM_STREAMING, timeout_s=20, what="it streams"
    )
    target.kill()
    killed_s = monotonic()
    wait_complete(load, NUM_MEANWHILE, what="the other decode service answers")

    target.start()
    back_s = wait_complete(load, NUM_AFTERWARDS, what="it is used again", worker=target.address)

    assert back_s < BACK_IN_USE_S

    def was_streaming(reply: Reply) -> bool:
        return (
            reply.worker == target.address
            and 0 < reply.first_text_s <= killed_s
            and reply.end is End.BROKEN
        )

    load.finish()
    Judgement(replies=load.replies, answers=answers, is_excused=was_streaming).check()
    broken = [reply for reply in load.replies if reply.end is End.BROKEN]
    assert len(broken) >= 1
    assert all(reply.ended_s < killed_s + 1.0 for reply in broken)
    assert all("stream_error" in reply.error and reply.status == 200 for reply in broken)


@pytest.mark.parametrize("index", [0, 1])
def test_killed_prefill_loses_nothing_and_is_used_again(
    cluster: Cluster, answers: Sequence[KnownAnswer], load: SteadyLoad, index: int
) -> None:
    """Decode has the KV of what it streams; what was being computed is computed elsewhere."""
    target = cluster.prefill[index]
    wait_until(lambda: is_computing(target), timeout_s=20, what="it computes")
    target.kill()
    wait_complete(load, NUM_MEANWHILE, what="the other prefill service serves")

    target.start()
    back_s = wait_until(
        lambda: prefill_status(target.address).num_pushed_bytes > 0,
        timeout_s=20,
        what="it is used again",
    )

    assert back_s < BACK_IN_USE_S
    wait_complete(load, NUM_AFTERWARDS, what="the load goes on")
    load.finish()
    Judgement(replies=load.replies, answers=answers, is_excused=lambda _: False).check()
    assert load.count(lambda one: one.end is End.BROKEN) == 0


def is_computing(prefill: ServiceProcess) -> bool:
    """Whether it has a job."""
    return prefill_status(prefill.address).num_active_jobs > 0


def test_killed_router_loses_what_passes_it_and_frees_the_pools(
    cluster: Cluster, answers: Sequence[KnownAnswer], load: SteadyLoad
) -> None:
    """Every client sees it, no service keeps anything, and a new router finds them all."""
    wait_until(lambda: load.num_streaming() >= NUM_STREAMING, timeout_s=20, what="answers stream")
    cluster.router.kill()
    killed_s = monotonic()
    cluster.wait_pools_whole(1.0)
    assert load.count(lambda one: one.end is End.BROKEN) >= NUM_STREAMING

    cluster.router.launch()
    cluster.router.wait_routing()
    back_s = monotonic() - killed_s
    wait_complete(load, NUM_AFTERWARDS, what="answers come again")

    assert back_s < ROUTER_BACK_S

    def was_under_way(reply: Reply) -> bool:
        return reply.sent_s < killed_s + back_s and reply.ended_s > killed_s - 0.1

    load.finish()
    Judgement(replies=load.replies, answers=answers, is_excused=was_under_way).check()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_rolling_restart_loses_nothing(
    cluster: Cluster, answers: Sequence[KnownAnswer], load: SteadyLoad, role: str
) -> None:
    """SIGTERM to one, then to the other: what runs is finished, what is refused goes elsewhere."""
    for target in cluster.decode if role == "decode" else cluster.prefill:
        target.signal(signal.SIGTERM)
        assert target.wait_exit(15.0) == 0
        wait_complete(load, NUM_AFTERWARDS, what="the other one serves")
        target.start()
        worker = target.address if role == "decode" else ""
        wait_complete(load, NUM_AFTERWARDS, what="it is used again", worker=worker)
    load.finish()
    assert load.count(lambda one: one.end is not End.COMPLETE) == 0
    Judgement(replies=load.replies, answers=answers, is_excused=lambda _: False).check()
