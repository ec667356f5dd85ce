"""The blocking client against a scripted service over real gRPC."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from serving_core.errors import InvalidRequestError, OverloadedError
from serving_core.rpc.status import to_rpc_status
from serving_core.tokenizer import Tokenizer
from tandem import (
    Client,
    InvalidInputError,
    Piece,
    ServerError,
    TimeoutExceededError,
    UnavailableError,
    Usage,
    default_model_dir,
)
from tandem import OverloadedError as ClientOverloadedError
from tests.support.fake_engine import FakeEngine, Responses, answer, chunk, complete, serving

WAIT_S = 10.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer_zip=Tokenizer.from_dir(default_model_dir()).files_zip())


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with serving(engine) as address, Client(address) as client:
        yield client


def word_ids(text: str) -> list[int]:
    return Tokenizer.from_dir(default_model_dir()).encode(text)


def test_generate_yields_pieces_as_they_come(engine: FakeEngine, client: Client) -> None:
    """The second piece is not sent before the first one was taken."""
    river, stone = word_ids("river stone")
    first_was_taken = threading.Event()

    def script(_: object, context: grpc.ServicerContext) -> Responses:
        yield chunk(river)
        assert first_was_taken.wait(WAIT_S)
        yield chunk(stone)
        yield complete(2)

    engine.script = script
    pieces = client.generate("<bos> . alice", max_tokens=2)
    assert next(pieces) == Piece(token_ids=(river,), text=" river")
    first_was_taken.set()
    assert list(pieces) == [Piece(token_ids=(stone,), text=" stone")]
    assert pieces.completion.token_ids == (river, stone)


def test_generate_completion_before_the_end_is_refused(engine: FakeEngine, client: Client) -> None:
    engine.script = answer(chunk(9), complete(1))
    generation = client.generate([1], max_tokens=1)
    with pytest.raises(ValueError, match="not complete"):
        _ = generation.completion
    list(generation)
    assert generation.completion.token_ids == (9,)


def test_complete_returns_the_whole(engine: FakeEngine, client: Client) -> None:
    river, stone = word_ids("river stone")
    engine.script = answer(chunk(river), chunk(), chunk(stone), complete(2))
    completion = client.complete("<bos> . alice", max_tokens=2)
    assert completion.token_ids == (river, stone)
    assert completion.text == " river stone"
    assert completion.finish_reason == "length"
    assert completion.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=2)
    timings = completion.timings
    assert timings.ttft_s is not None
    assert timings.tpot_s is not None
    assert 0 < timings.ttft_s <= timings.total_s
    assert timings.prefill_queue_s == 0.25
    assert timings.prefill_compute_s == 0.5
    assert timings.exposed_transfer_s == 0.125
    assert timings.num_pushed_bytes == 4096


@pytest.mark.parametrize("output_ids", [(12,), (10, 11, 12)])
def test_complete_last_message_carries_tokens_counts_each_once(
    engine: FakeEngine, client: Client, output_ids: tuple[int, ...]
) -> None:
    """Services differ: the last message may hold the rest, or all tokens again."""
    engine.script = answer(chunk(10, 11), complete(3, output_ids=output_ids))
    assert client.complete([1]).token_ids == (10, 11, 12)


def test_complete_model_without_tokenizer_has_no_text(engine: FakeEngine, client: Client) -> None:
    engine.tokenizer_zip = None
    engine.script = answer(chunk(10), complete(1))
    completion = client.complete([1, 2])
    assert completion.token_ids == (10,)
    assert completion.text is None


def test_complete_stop_string_is_left_out_of_the_text(engine: FakeEngine, client: Client) -> None:
    ids = word_ids("river stone cloud")
    engine.script = answer(*(chunk(token_id) for token_id in ids), complete(3))
    pieces = list(client.generate("<bos> .", stop=["e clo"]))
    assert "".join(piece.text for piece in pieces) == " river ston"
    assert client.complete("<bos> .", stop=["e clo"], include_stop_str_in_output=True).text == (
        " river stone clo"
    )


def test_client_fetches_the_tokenizer_once(engine: FakeEngine, client: Client) -> None:
    client.complete([1])
    client.complete([1])
    assert engine.num_tokenizer_calls == 1


def test_generate_sends_prompt_and_sampling(engine: FakeEngine, client: Client) -> None:
    client.complete([3, 4], max_tokens=7, top_k=5, seed=-2, stop="x", stop_token_ids=[8])
    client.complete("hello", temperature=0.5, skip_special_tokens=False)
    ids, text = engine.requests
    assert list(ids.tokenized.input_ids) == [3, 4]
    assert ids.stream
    params = ids.sampling_params
    assert (params.max_tokens, params.top_k, params.seed) == (7, 5, -2)
    assert list(params.stop) == ["x"]
    assert list(params.stop_token_ids) == [8]
    assert params.HasField("temperature")
    assert params.temperature == 0.0
    assert params.skip_special_tokens
    assert text.text == "hello"
    assert text.sampling_params.temperature == 0.5
    assert not text.sampling_params.skip_special_tokens
    assert not text.sampling_params.HasField("max_tokens")
    assert ids.request_id != text.request_id


def test_client_names_its_model_in_the_metadata(engine: FakeEngine) -> None:
    with serving(engine) as address:
        with Client(address, model="tiny-recall") as client:
            client.complete([1])
        with Client(address) as client:
            client.complete([1])
    named, unnamed = engine.metadata
    assert named["x-tandem-model"] == "tiny-recall"
    assert "x-tandem-model" not in unnamed


def test_generate_service_refuses_raises_with_field_value_and_limit(
    engine: FakeEngine, client: Client
) -> None:
    def script(_: object, context: grpc.ServicerContext) -> Responses:
        error = InvalidRequestError("sampling_params.max_tokens", 0, "at least 1")
        context.abort_with_status(to_rpc_status(error))
        yield from ()

    engine.script = script
    with pytest.raises(InvalidInputError) as caught:
        client.complete([1], max_tokens=0)
    error = caught.value
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_REQUEST"
    assert (error.field, error.value, error.limit) == (
        "sampling_params.max_tokens",
        "0",
        "at least 1",
    )
    assert not error.retryable


def test_generate_overloaded_carries_the_retry_delay(engine: FakeEngine, client: Client) -> None:
    def script(_: object, context: grpc.ServicerContext) -> Responses:
        yield chunk(10)
        context.abort_with_status(to_rpc_status(OverloadedError("full", retry_after_s=2.5)))

    engine.script = script
    generation = client.generate([1])
    assert next(generation).token_ids == (10,)
    with pytest.raises(ClientOverloadedError) as caught:
        next(generation)
    assert caught.value.retry_after_s == 2.5
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.DATA_LOSS, ServerError),
    ],
)
def test_generate_status_without_details_maps_to_its_class(
    engine: FakeEngine, client: Client, code: grpc.StatusCode, error_class: type[Exception]
) -> None:
    def script(_: object, context: grpc.ServicerContext) -> Responses:
        context.abort(code, "because")
        yield from ()

    engine.script = script
    with pytest.raises(error_class, match=f"{code.name}: because"):
        client.complete([1])


def hanging_script(_: object, context: grpc.ServicerContext) -> Responses:
    """One token, then nothing until the call ends."""
    yield chunk(10)
    over = threading.Event()
    context.add_callback(over.set)
    over.wait(WAIT_S)


def test_generation_closed_early_cancels_on_the_service(engine: FakeEngine, client: Client) -> None:
    engine.script = hanging_script
    with client.generate([1]) as generation:
        next(generation)
        assert not engine.ended.is_set()
    assert engine.ended.wait(WAIT_S)


def test_generation_dropped_cancels_on_the_service(engine: FakeEngine, client: Client) -> None:
    engine.script = hanging_script
    for piece in client.generate([1]):
        assert piece.token_ids == (10,)
        break
    assert engine.ended.wait(WAIT_S)


def test_generate_time_runs_out_raises(engine: FakeEngine, client: Client) -> None:
    engine.script = hanging_script
    with pytest.raises(TimeoutExceededError):
        client.complete([1], timeout_s=0.3)


def test_generate_stream_without_final_response_is_a_server_error(
    engine: FakeEngine, client: Client
) -> None:
    engine.script = answer(chunk(10))
    with pytest.raises(ServerError, match="without its final response"):
        client.complete([1])


def test_generate_timings_that_are_no_json_are_a_server_error(
    engine: FakeEngine, client: Client
) -> None:
    engine.script = answer(complete(0), timings_json="{")
    with pytest.raises(ServerError, match="not JSON"):
        client.complete([1])


def test_client_nobody_listens_raises_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError) as caught:
        client.complete([1])
    assert caught.value.retryable


def test_client_abort_names_the_request(engine: FakeEngine, client: Client) -> None:
    client.abort("mine")
    assert engine.aborted == ["mine"]


@pytest.mark.parametrize(
    ("sampling", "field", "limit"),
    [
        ({"max_tokens": -1}, "max_tokens", "an integer in [0, 4294967295]"),
        ({"max_tokens": 2**40}, "max_tokens", "an integer in [0, 4294967295]"),
        ({"seed": 2**31}, "seed", "an integer in [-2147483648, 2147483647]"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"stop": [3]}, "stop", "text"),
    ],
)
def test_generate_value_the_protocol_cannot_carry_is_refused_locally(
    engine: FakeEngine, client: Client, sampling: dict[str, object], field: str, limit: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        client.generate([1], **sampling)  # type: ignore[arg-type]  # wrong on purpose
    assert (caught.value.field, caught.value.limit) == (field, limit)
    assert engine.requests == []


def test_generate_negative_token_id_is_refused_locally(client: Client) -> None:
    with pytest.raises(InvalidInputError) as caught:
        client.generate([1, -5])
    assert caught.value.field == "prompt token id"
    assert caught.value.value == "-5"


def test_generate_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate([1], temprature=0.5)  # type: ignore[call-arg]  # wrong on purpose


def zip_of(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "sha256", "message"),
    [
        (zip_of("tokenizer.json", b"{}"), "0" * 64, "sha256"),
        (b"no zip at all", "", "damaged"),
        (zip_of("../tokenizer.json", b"{}"), "", "path"),
        (zip_of("tokenizer.json", b"{}"), "", "tokenizer"),
    ],
)
def test_client_bad_tokenizer_is_a_server_error(
    engine: FakeEngine, client: Client, data: bytes, sha256: str, message: str
) -> None:
    engine.tokenizer_zip, engine.tokenizer_sha256 = data, sha256
    with pytest.raises(ServerError, match=message):
        client.complete([1])


def test_request_type_of_the_protocol_is_what_the_service_gets(
    engine: FakeEngine, client: Client
) -> None:
    client.complete([1], request_id="given")
    assert isinstance(engine.requests[0], vllm_engine_pb2.GenerateRequest)
    assert engine.requests[0].request_id == "given"
