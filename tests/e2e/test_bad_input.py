"""Bad input gets a status that names field, value and limit, and the services live on (I4, I7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.pair import Pair, PairSettings, running_pair
from tests.support.processes import prefill_status
from tests.support.raw_client import greedy_request, run_generate

PROMPT = make_prompt(40, seed=5)
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def pair(
    tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One pair for the module: every test also shows that it survived the ones before."""
    settings = PairSettings(
        model_dir=tiny_checkpoints["ds_plain"],
        decode_args=[f"--max-model-len={MAX_MODEL_LEN}"],
        prefill_args=[f"--max-model-len={MAX_MODEL_LEN}"],
    )
    with running_pair(settings, tmp_path_factory.mktemp("bad_input")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sampling", "words"),
    [
        ([], 4, {}, ["prompt", "empty"]),
        (make_prompt(MAX_MODEL_LEN + 1, seed=1), 4, {}, ["prompt", str(MAX_MODEL_LEN)]),
        (PROMPT, 0, {}, ["max_tokens", "0", "1"]),
        (PROMPT, MAX_MODEL_LEN, {}, ["max_tokens", str(MAX_MODEL_LEN)]),
        (PROMPT, 4, {"temperature": -1.0}, ["temperature", "-1", "0"]),
        (PROMPT, 4, {"temperature": float("nan")}, ["temperature", "nan"]),
        (PROMPT, 4, {"top_p": 1.5}, ["top_p", "1.5", "1"]),
        ([*PROMPT, 512], 4, {}, ["512", "511"]),
        ([*PROMPT, 2**32 - 1], 4, {}, [str(2**32 - 1), "511"]),
        (PROMPT, 4, {"n": 2}, ["n", "2", "1"]),
        (PROMPT, 4, {"presence_penalty": 1.0}, ["presence_penalty"]),
        (PROMPT, 4, {"regex": "a+"}, ["regex"]),
        (PROMPT, 4, {"logprobs": 3}, ["logprobs"]),
        (PROMPT, 4, {"min_tokens": 9}, ["min_tokens", "9", "4"]),
    ],
)
def test_bad_request_is_refused_by_name_and_leaves_nothing_behind(
    pair: Pair, prompt: list[int], max_tokens: int, sampling: dict[str, Any], words: list[str]
) -> None:
    """INVALID_ARGUMENT; prefill never saw it; a good request still works."""
    pushed_before = prefill_status(pair.prefill.address).num_pushed_bytes
    outcome = run_generate(pair.decode.address, greedy_request(prompt, max_tokens, **sampling))
    assert outcome.status is grpc.StatusCode.INVALID_ARGUMENT, outcome
    for word in words:
        assert word in outcome.details, outcome.details
    assert prefill_status(pair.prefill.address).num_pushed_bytes == pushed_before
    assert pair.pools_are_whole()
    good = run_generate(pair.decode.address, greedy_request(PROMPT, 2))
    assert good.status is grpc.StatusCode.OK
    pair.wait_pools_whole(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("request_id", ["", "same", "x" * 100_000, "\u0000\n💥", "../../etc"])
def test_odd_and_equal_request_ids_never_mix_answers(pair: Pair, request_id: str) -> None:
    """I4: two different prompts with one id, open at once, get their own tokens."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [make_prompt(60, seed=11), make_prompt(70, seed=12)]
    alone = [
        run_generate(pair.decode.address, greedy_request(p, 8, request_id=f"alone-{i}")).token_ids
        for i, p in enumerate(prompts)
    ]
    requests = [greedy_request(p, 8, request_id=request_id) for p in prompts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda r: run_generate(pair.decode.address, r), requests))
    assert [outcome.token_ids for outcome in together] == alone


@pytest.mark.slow
def test_request_without_input_is_refused(pair: Pair) -> None:
    """The oneof is unset."""
    request = vllm_engine_pb2.GenerateRequest(request_id="none", stream=True)
    outcome = run_generate(pair.decode.address, request)
    assert outcome.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "input" in outcome.details or "prompt" in outcome.details


@pytest.mark.slow
def test_unknown_model_is_not_found(pair: Pair) -> None:
    """The protocol has no model field; direct clients name one in metadata."""
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    with grpc.insecure_channel(pair.decode.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(
            greedy_request(PROMPT, 2), metadata=[("x-tandem-model", "no-such-model")], timeout=10
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no-such-model" in caught.value.details()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rpc", ["Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"]
)
def test_rpcs_that_are_not_served_answer_unimplemented(pair: Pair, rpc: str) -> None:
    """Named in the protocol, not served by us."""
    from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

    requests: dict[str, Any] = {
        "Embed": vllm_engine_pb2.EmbedRequest(),
        "FlushCache": common_pb2.FlushCacheRequest(),
        "StartProfile": common_pb2.StartProfileRequest(),
        "StopProfile": common_pb2.StopProfileRequest(),
        "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest(),
    }

    def call(stub: Any) -> None:
        reply = getattr(stub, rpc)(requests[rpc], timeout=10)
        if rpc == "SubscribeKvEvents":
            list(reply)

    with (
        grpc.insecure_channel(pair.decode.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        call(vllm_engine_pb2_grpc.VllmEngineStub(channel))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
