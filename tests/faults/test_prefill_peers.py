"""Two prefill processes under one decode process: what one loses, the other makes good.

A request that no other one runs beside goes to the first peer, so that is the one that fails. I1,
I3 and I6 of the design, with a client that notices nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.fault_plan import Fault, FaultPlan
from tests.support.prefill_peers import Peers, running_peers
from tests.support.processes import prefill_pool_is_whole, prefill_status, wait_until
from tests.support.raw_client import Outcome, greedy_request, open_generate, run_generate

PROMPT = make_prompt(4 * 32 + 3, seed=99)
MAX_TOKENS = 6
SLOW = FaultPlan(write_delay_s=0.03)
Oracle = Callable[[Path, list[int], int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def ask(peers: Peers) -> Outcome:
    """One request."""
    return run_generate(peers.decode.address, greedy_request(PROMPT, MAX_TOKENS))


def wait_whole(peers: Peers, timeout_s: float = 1.0) -> None:
    """Wait until decode and the last prefill process hold nothing."""
    wait_until(peers.decode_pool_is_whole, timeout_s=timeout_s, what="decode's pool is whole")
    last = peers.prefills[-1].address
    wait_until(lambda: prefill_pool_is_whole(last), timeout_s=1.0, what="prefill's pool is whole")


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_peer_killed_while_pushing_a_layer_costs_no_request(
    layer: int, tiny_checkpoints: dict[str, Path], greedy_oracle: Oracle, tmp_path: Path
) -> None:
    """The same tokens come from the other one, on another ticket, and no block is lost."""
    model_dir = tiny_checkpoints["ds_plain"]
    plans = [FaultPlan(fault=Fault.KILL_SELF, layer=layer), FaultPlan()]
    with running_peers(model_dir, tmp_path, plans) as peers:
        outcome = ask(peers)
        assert outcome.status is grpc.StatusCode.OK, outcome
        assert outcome.token_ids == greedy_oracle(model_dir, PROMPT, MAX_TOKENS)
        assert outcome.seconds < 5.0
        wait_until(lambda: not peers.prefill.is_running(), timeout_s=1.0, what="the kill")
        assert peers.metric("tandem_handoff_retries_total") == 1
        wait_whole(peers)
        assert ask(peers).token_ids == outcome.token_ids


def test_peer_stopped_while_pushing_is_replaced_and_its_blocks_stay_out_of_use(
    tiny_checkpoints: dict[str, Path], greedy_oracle: Oracle, tmp_path: Path
) -> None:
    """Nothing proves a stopped writer quiet; when it goes on, its blocks return and it serves."""
    model_dir = tiny_checkpoints["ds_plain"]
    expected = greedy_oracle(model_dir, PROMPT, MAX_TOKENS)
    with running_peers(model_dir, tmp_path, [SLOW, FaultPlan()]) as peers:
        request = greedy_request(PROMPT, MAX_TOKENS)
        with open_generate(peers.decode.address, request) as call:
            wait_until(
                lambda: prefill_status(peers.prefill.address).num_pushed_bytes > 0,
                timeout_s=10,
                what="the push runs",
            )
            peers.prefill.signal(signal.SIGSTOP)
            replies = list(call)
        tokens = [token for reply in replies for token in reply.chunk.token_ids]
        assert tokens + list(replies[-1].complete.output_ids) == expected
        wait_until(
            lambda: (peers.metric("tandem_kv_quarantined_blocks") or 0) > 0,
            timeout_s=3.0,
            what="quarantine",
        )
        beside = ask(peers)
        assert beside.token_ids == expected
        assert beside.seconds < 2.0, "a request waited for the stopped peer"
        assert peers.metric("tandem_kv_quarantined_blocks") != 0
        assert not peers.decode_pool_is_whole()

        peers.prefill.signal(signal.SIGCONT)
        wait_whole(peers, timeout_s=2.0)
        peers.wait_usable([peers.prefill])
        assert ask(peers).token_ids == expected


def test_peer_that_always_fails_is_left_out_until_a_request_succeeds_there(
    tiny_checkpoints: dict[str, Path], greedy_oracle: Oracle, tmp_path: Path
) -> None:
    model_dir = tiny_checkpoints["ds_plain"]
    expected = greedy_oracle(model_dir, PROMPT, MAX_TOKENS)
    armed = tmp_path / "armed"
    armed.touch()
    bad = FaultPlan(fault=Fault.FAIL_WRITE, layer=1, arm_file=str(armed))
    with running_peers(model_dir, tmp_path, [bad, FaultPlan()]) as peers:
        for _ in range(8):
            assert ask(peers).token_ids == expected
        assert peers.metric("tandem_prefill_breaker_state", peers.prefill) == 2
        assert peers.metric("tandem_prefill_breaker_state", peers.prefills[1]) == 0
        assert peers.metric("tandem_handoff_retries_total") == 3
        armed.unlink()
        wait_until(
            lambda: (
                ask(peers).token_ids == expected
                and peers.metric("tandem_prefill_breaker_state", peers.prefill) == 0
            ),
            timeout_s=20,
            what="the breaker closes",
        )
        wait_whole(peers)


@contextmanager
def traffic(peers: Peers, num_clients: int) -> Iterator[list[Outcome]]:
    """Clients that ask one request after the other until the block ends."""
    outcomes: list[Outcome] = []
    ends = threading.Event()

    def run_client() -> None:
        while not ends.is_set():
            outcomes.append(ask(peers))

    with ThreadPoolExecutor(num_clients) as executor:
        clients = [executor.submit(run_client) for _ in range(num_clients)]
        try:
            yield outcomes
        finally:
            ends.set()
            for client in clients:
                client.result(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_peers_come_and_go_under_traffic_without_a_lost_request(
    tiny_checkpoints: dict[str, Path], greedy_oracle: Oracle, tmp_path: Path
) -> None:
    model_dir = tiny_checkpoints["ds_plain"]
    with running_peers(model_dir, tmp_path, [SLOW, SLOW], num_named=1) as peers:
        first, second = peers.prefills
        with traffic(peers, 2) as outcomes:
            wait_until(lambda: len(outcomes) > 2, timeout_s=30, what="traffic")
            peers.write_peers([first, second])
            wait_until(
                lambda: prefill_status(second.address).num_pushed_bytes > 0,
                timeout_s=10,
                what="the added peer gets requests",
            )
            wait_until(
                lambda: prefill_status(first.address).num_active_jobs > 0,
                timeout_s=10,
                what="the first peer is at work",
            )
            peers.write_peers([second])
            wait_until(
                lambda: peers.metric("tandem_prefill_peer_usable", first) is None,
                timeout_s=5,
                what="the removed peer is shown no more",
            )
            wait_until(
                lambda: f"prefill={first.address} closed" in peers.decode.log_tail(10_000),
                timeout_s=20,
                what="the removed peer's channel is closed",
            )
            num_bytes = prefill_status(first.address).num_pushed_bytes
            num_before = len(outcomes)
            peers.peers_file.write_text(f'prefill-address = ["{first.address}"')
            wait_until(
                lambda: peers.metric("tandem_prefill_peers_file_invalid") == 1,
                timeout_s=5,
                what="half a file is noticed",
            )
            wait_until(lambda: len(outcomes) > num_before + 2, timeout_s=30, what="traffic")
        assert prefill_status(first.address).num_pushed_bytes == num_bytes
        assert {one.status for one in outcomes} == {grpc.StatusCode.OK}
        expected = greedy_oracle(model_dir, PROMPT, MAX_TOKENS)
        assert {tuple(one.token_ids) for one in outcomes} == {tuple(expected)}
        wait_whole(peers)
        assert prefill_pool_is_whole(first.address)


def test_decode_without_a_peer_is_ready_but_moves_no_kv_until_one_is_named(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    plans = [FaultPlan()]
    with running_peers(tiny_checkpoints["ds_plain"], tmp_path, plans, num_named=0) as peers:
        with grpc.insecure_channel(peers.decode.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", "tandem.ready"):
                reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING, name
        assert not peers.kv_is_ready()
        refused = ask(peers)
        assert refused.status is grpc.StatusCode.UNAVAILABLE
        assert refused.seconds < 1.0
        peers.write_peers(peers.prefills)
        peers.wait_kv_ready()
        assert ask(peers).status is grpc.StatusCode.OK
        peers.write_peers([])
        wait_until(lambda: not peers.kv_is_ready(), timeout_s=5, what="the last peer is gone")
