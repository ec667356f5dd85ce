"""The OpenAI HTTP API of the smg router in front of a real pair, started by `tandem up`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tandem.default_model import default_model_dir, recall_questions
from tandem.launcher import Launcher, LauncherError, LaunchSettings, RunningServices
from tests.support.processes import prefill_pool_is_whole, wait_until

MODEL = default_model_dir().name
[QUESTION] = recall_questions(num_words=256, num_facts=8, num_questions=1, seed=1)


@pytest.fixture(scope="module")
def services() -> Iterator[RunningServices]:
    """Prefill, decode and router."""
    settings = LaunchSettings(model_dir=default_model_dir(), router=True, num_threads=1)
    with Launcher(settings) as launcher:
        yield launcher.start()


def post(router: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = http.client.HTTPConnection(router, timeout=30)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def completion_body(**fields: Any) -> dict[str, Any]:
    """A greedy completion request for the recall question."""
    return {
        "model": MODEL,
        "prompt": QUESTION.prompt,
        "max_tokens": 3,
        "temperature": 0,
        **fields,
    }


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream that ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
def test_completion_recalls_the_fact_and_counts_tokens(services: RunningServices) -> None:
    status, body = post(services.router, "/v1/completions", completion_body())
    reply = json.loads(body)
    assert status == 200
    assert reply["choices"][0]["text"].split() == QUESTION.answer.split()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["usage"]["prompt_tokens"] == 256


@pytest.mark.slow
def test_streamed_completion_has_the_same_text(services: RunningServices) -> None:
    status, body = post(services.router, "/v1/completions", completion_body(stream=True))
    assert status == 200
    text = "".join(event["choices"][0]["text"] for event in events(body))
    assert text.split() == QUESTION.answer.split()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_chat_recalls_the_fact(services: RunningServices, stream: bool) -> None:
    """The model's own template makes the same prompt of two messages."""
    context, name = QUESTION.prompt.removeprefix("<bos> ").split(" ? ")
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": context},
            {"role": "user", "content": f"? {name}"},
        ],
        "max_tokens": 3,
        "temperature": 0,
        "stream": stream,
    }
    status, reply = post(services.router, "/v1/chat/completions", body)
    assert status == 200
    if stream:
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events(reply))
    else:
        text = json.loads(reply)["choices"][0]["message"]["content"]
    assert text.split() == QUESTION.answer.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "word"),
    [({"max_tokens": 0}, "max_tokens"), ({"presence_penalty": 1.0}, "presence_penalty")],
)
def test_bad_request_is_a_400_that_names_the_field(
    services: RunningServices, fields: dict[str, Any], word: str
) -> None:
    status, body = post(services.router, "/v1/completions", completion_body(**fields))
    assert status == 400
    assert word in body.decode()


@pytest.mark.slow
def test_unknown_model_is_a_404(services: RunningServices) -> None:
    status, _ = post(services.router, "/v1/completions", completion_body(model="no-such-model"))
    assert status == 404


@pytest.mark.slow
def test_disconnect_in_mid_stream_frees_both_pools(services: RunningServices) -> None:
    connection = http.client.HTTPConnection(services.router, timeout=30)
    body = completion_body(stream=True, max_tokens=8000, ignore_eos=True)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    assert not decode_is_idle(services.decode[0])
    reply.close()
    connection.close()
    wait_until(lambda: decode_is_idle(services.decode[0]), timeout_s=1.0, what="decode is idle")
    wait_until(
        lambda: prefill_pool_is_whole(services.prefill[0]), timeout_s=1.0, what="prefill is idle"
    )


def decode_is_idle(address: str) -> bool:
    """Whether decode holds no token and no request."""
    with grpc.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        load = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=5).loads[0]
    return load.num_used_tokens == 0 and load.num_total_reqs == 0


@pytest.mark.slow
def test_router_that_cannot_listen_is_named(services: RunningServices, tmp_path: Path) -> None:
    """Its port is taken by the router of the other tests."""
    settings = LaunchSettings(
        model_dir=default_model_dir(),
        router=True,
        router_port=int(services.router.rpartition(":")[2]),
        num_threads=1,
        log_dir=tmp_path,
        ready_timeout_s=30.0,
    )
    with Launcher(settings) as launcher, pytest.raises(LauncherError, match=r"port \d+ is in use"):
        launcher.start()
