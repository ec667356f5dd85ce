"""What the router answers when a request cannot be served, and how often it tries."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.support.checkpoints import CHAIN_TEXT, write_chain_checkpoint
from tests.support.openai_api import Api, Reply, running_api
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain checkpoint with a template."""
    directory = write_chain_checkpoint(tmp_path_factory.mktemp("errors") / "chain")
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return directory


@pytest.fixture(scope="module")
def api(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """It behind a router."""
    with running_api(model_dir, tmp_path_factory.mktemp("errors-api")) as running:
        yield running


def chat(api: Api, **fields: Any) -> Reply:
    """A chat of one message."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    return api.post("/v1/chat/completions", **body)


def complete(api: Api, **fields: Any) -> Reply:
    """A completion."""
    return api.post("/v1/completions", **{"prompt": "hi", "max_tokens": 3, **fields})


def assert_still_serves(api: Api) -> None:
    """A good request afterwards gets its answer."""
    assert complete(api, temperature=0).json["choices"][0]["text"] == "aé"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 2}, "sampling_params.n = 2"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"response_format": SCHEMA}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "json_schema"),
        ({"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_chat_that_asks_for_too_much_is_refused_once_by_name(
    api: Api, fields: dict[str, Any], word: str, stream: bool
) -> None:
    api.requests.new()
    reply = chat(api, stream=stream, **fields)
    assert reply.status == 400, reply.body
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert word in reply.json["error"]["message"]
    assert len(api.requests.new()) == 1, "the router tried a client's error again"
    assert_still_serves(api)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 2}, "sampling_params.n = 2"),
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"prompt": ""}, "prompt = 0 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ],
)
def test_completion_that_asks_for_too_much_is_refused_once_by_name(
    api: Api, fields: dict[str, Any], word: str
) -> None:
    api.requests.new()
    reply = complete(api, **fields)
    assert reply.status == 400, reply.body
    assert word in reply.json["error"]["message"]
    assert len(api.requests.new()) == 1, "the router tried a client's error again"
    assert_still_serves(api)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"prompt": "x" * 3000}, 400, "context_length_exceeded"),
        ({"prompt": [1, 2, 3]}, 400, "invalid_type"),
        ({"prompt": []}, 400, "prompt_empty"),
        ({"model": "no-such-model"}, 404, "model_not_found"),
        ({"temperature": -1}, 400, "decimal_below_min_value"),
        ({"top_p": 2}, 400, "decimal_above_max_value"),
    ],
)
def test_what_the_router_refuses_itself_never_reaches_decode(
    api: Api, fields: dict[str, Any], status: int, code: str
) -> None:
    api.requests.new()
    reply = complete(api, **fields)
    assert (reply.status, reply.json["error"]["code"]) == (status, code)
    assert api.requests.new() == []


def test_what_is_not_served_is_not_implemented(api: Api) -> None:
    reply = api.post("/v1/embeddings", input="hi")
    assert reply.status == 501
    assert "Embed is not served here" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"5": 100}}, {"best_of": 3}, {"response_format": SCHEMA}]
)
def test_fields_that_the_router_drops_are_still_dropped(api: Api, fields: dict[str, Any]) -> None:
    """docs/operations.md lists them. A router that sends them fails this, and the list shrinks."""
    reply = complete(api, temperature=0, max_tokens=40, **fields)
    assert (reply.status, reply.json["choices"][0]["text"]) == (200, CHAIN_TEXT)


def test_official_client_raises_typed_errors_that_name_the_field(api: Api) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with api.client() as client:
        with pytest.raises(openai.BadRequestError, match="presence_penalty"):
            client.chat.completions.create(model=api.model, messages=messages, presence_penalty=1.0)
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=messages)


def test_full_service_is_429_after_few_tries_and_serves_again(
    model_dir: Path, tmp_path: Path
) -> None:
    """Two long requests fill it; the router tries once more and then tells its client."""
    with running_api(model_dir, tmp_path, "--max-num-seqs=1", "--max-queued-requests=1") as api:
        body = {"model": api.model, "prompt": "x", "max_tokens": 2000, "stream": True}
        headers = {"Content-Type": "application/json"}
        connections = []
        for _ in range(2):
            connection = http.client.HTTPConnection(api.services.router, timeout=30)
            text = json.dumps({**body, "ignore_eos": True})
            connection.request("POST", "/v1/completions", text, headers)
            connections.append(connection)
        wait_until(lambda: num_open(api) == 2, timeout_s=10, what="two open requests")
        api.requests.new()
        reply = complete(api)
        assert reply.status == 429, reply.body
        assert "the limit is 2" in reply.json["error"]["message"]
        assert len(api.requests.new()) == 2
        with api.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=api.model, prompt="x", max_tokens=3)
        for connection in connections:
            connection.close()
        wait_until(lambda: num_open(api) == 0, timeout_s=5, what="both requests gone")
        assert_still_serves(api)


def test_dead_prefill_is_503_that_says_so(model_dir: Path, tmp_path: Path) -> None:
    with running_api(model_dir, tmp_path, "--prefill-wait-s=0.2") as api:
        assert_still_serves(api)
        os.kill(api.pids["prefill-0"], signal.SIGKILL)
        for stream in (False, True):
            api.requests.new()
            reply = complete(api, stream=stream)
            assert reply.status == 503, reply.body
            assert "no usable prefill service" in reply.json["error"]["message"]
            assert 1 <= len(api.requests.new()) <= 3
        with api.client() as client, pytest.raises(openai.InternalServerError, match="503"):
            client.completions.create(model=api.model, prompt="x", max_tokens=3)
        assert num_open(api) == 0


def num_open(api: Api) -> int:
    """Requests that decode has not ended."""
    with grpc.insecure_channel(api.services.decode[0]) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        loads = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=5).loads
    return int(loads[0].num_total_reqs)
