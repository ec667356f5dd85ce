"""Stop sequences, sampling and characters of several tokens through the router.

The chain checkpoint greedily says `CHAIN_TEXT`, one token a byte, then <eos>, then all of it again;
sampled at temperature 1 it says almost anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serving_core.tokenizer import Tokenizer
from tandem import Client
from tests.support.checkpoints import CHAIN_TEXT, EOS_TOKEN_ID, write_chain_checkpoint
from tests.support.openai_api import Api, Reply, running_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = "tell me"
ENDPOINTS = ("chat", "completions")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The chain checkpoint behind a router."""
    work_dir = tmp_path_factory.mktemp("sampling-api")
    model_dir = write_chain_checkpoint(work_dir / "chain")
    (model_dir / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with running_api(model_dir, work_dir) as running:
        yield running


def ask(api: Api, endpoint: str, **fields: Any) -> Reply:
    """The same prompt by either endpoint, greedy and long enough unless told otherwise."""
    fields = {"temperature": 0, "max_tokens": 40, **fields}
    if endpoint == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        reply = api.post("/v1/chat/completions", messages=messages, **fields)
    else:
        reply = api.post("/v1/completions", prompt=PROMPT, **fields)
    assert reply.status == 200, reply.body
    return reply


def outcome(api: Api, endpoint: str, *, stream: bool, **fields: Any) -> tuple[str, str, list[str]]:
    """Text, finish reason and the pieces in which the text came."""
    reply = ask(api, endpoint, stream=stream, **fields)
    choices = [event["choices"][0] for event in reply.events] if stream else reply.json["choices"]
    if endpoint == "chat":
        told = [choice["delta" if stream else "message"].get("content") for choice in choices]
    else:
        told = [choice["text"] for choice in choices]
    pieces = [piece for piece in told if piece]
    return "".join(pieces), choices[-1]["finish_reason"], pieces


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (CHAIN_TEXT, "stop")),
        # Of several tokens each; one begins and one ends inside what is said.
        ({"stop": "数c"}, ("aéb", "stop")),
        ({"stop": ["no", "c\N{GRINNING FACE}d"]}, ("aéb数", "stop")),
        ({"stop": ["d", "b", "数"]}, ("aé", "stop")),
        ({"stop": ["a"]}, ("", "stop")),
        ({"stop": ["dd", "ab", "数d"]}, (CHAIN_TEXT, "stop")),
        ({"stop": "da", "ignore_eos": True}, (CHAIN_TEXT[:-1], "stop")),
        ({"stop": "数c", "no_stop_trim": True}, ("aéb数c", "stop")),
        ({"stop_token_ids": [69]}, ("aéb数", "stop")),  # "c"
        ({"ignore_eos": True, "max_tokens": 16}, (CHAIN_TEXT + "a", "length")),
        (
            {"ignore_eos": True, "max_tokens": 15, "skip_special_tokens": False},
            (CHAIN_TEXT + "<eos>a", "length"),
        ),
        ({"max_tokens": 13}, (CHAIN_TEXT, "length")),
        ({"max_tokens": 12}, (CHAIN_TEXT[:-1], "length")),
        ({"max_tokens": 10}, ("aéb数c", "length")),  # inside the face
        ({"temperature": 1, "top_k": 1}, (CHAIN_TEXT, "stop")),
        ({"temperature": 1, "top_p": 0.001}, (CHAIN_TEXT, "stop")),
        ({"temperature": 1, "min_p": 0.5}, (CHAIN_TEXT, "stop")),
    ],
)
def test_text_ends_where_it_must(
    api: Api, endpoint: str, stream: bool, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    text, finish_reason, pieces = outcome(api, endpoint, stream=stream, **fields)
    assert (text, finish_reason) == expected
    assert "\N{REPLACEMENT CHARACTER}" not in text
    if stream and len(text) > 4:
        assert len(pieces) > 1, "a streamed answer came in one piece"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_stop_string_ends_the_work_too(api: Api, endpoint: str) -> None:
    """Not only the text: no token is computed after the stop string's last one."""
    reply = ask(api, endpoint, stop="数c", max_tokens=200, ignore_eos=True)
    assert reply.json["usage"]["completion_tokens"] == len("aéb数c".encode())
    assert reply.json["choices"][0]["matched_stop"] == "数c"


def test_seed_decides_the_tokens_through_the_router_as_directly(api: Api) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24}
    token_ids = Tokenizer.from_dir(api.model_dir).encode(PROMPT)
    texts = {}
    with Client(api.services.decode[0]) as client:
        for seed in (11, 12):
            direct = client.complete(
                token_ids, seed=seed, ignore_eos=True, skip_special_tokens=False, **sampling
            )
            assert direct.text
            for endpoint in ENDPOINTS:
                for stream in (False, True):
                    text, _, _ = outcome(
                        api,
                        endpoint,
                        stream=stream,
                        seed=seed,
                        ignore_eos=True,
                        skip_special_tokens=False,
                        **sampling,
                    )
                    # Only the client shows a character that the last tokens leave open.
                    assert text == direct.text.rstrip("\N{REPLACEMENT CHARACTER}")
            texts[seed] = direct.text
    assert texts[11] != texts[12]
    without_a_seed = {outcome(api, "completions", stream=False, **sampling)[0] for _ in range(3)}
    assert len(without_a_seed) > 1


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_reaches_decode_as_it_was_given(api: Api, endpoint: str) -> None:
    """What the service obeys must arrive there, with the values of the request."""
    api.requests.new()
    ask(
        api,
        endpoint,
        temperature=0.5,
        top_p=0.75,
        top_k=9,
        min_p=0.25,
        seed=-7,
        stop=["xx", "yy"],
        stop_token_ids=[400],
        ignore_eos=True,
        max_tokens=3,
    )
    [asked] = api.requests.new()
    params = asked.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 9, 0.25)
    assert (params.seed, list(params.stop), list(params.stop_token_ids)) == (
        -7,
        ["xx", "yy"],
        [400],
    )
    assert (params.ignore_eos, params.max_tokens, params.n) == (True, 3, 1)


def test_end_token_is_counted_and_named(api: Api) -> None:
    reply = ask(api, "completions")
    assert reply.json["choices"][0]["matched_stop"] == EOS_TOKEN_ID
    assert reply.json["usage"]["completion_tokens"] == len(CHAIN_TEXT.encode()) + 1
