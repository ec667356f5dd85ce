"""The demo's HTTP clients against a scripted server: the text of each way, and every failure."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandem.demo_clients import Ask, HttpError, Way, all_ways, installed_clients

ASK = Ask(model="m", prompt="a b", messages=[("system", "a"), ("user", "b")], max_tokens=2)
WAYS = all_ways(["curl", "openai"])


class Router(ThreadingHTTPServer):
    """Answers "one two" in each of the four forms, or `failure` as an error or as an event."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.event: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Router

    def do_POST(self) -> None:
        """Remember it and answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.server.status != 200:
            self.reply("application/json", json.dumps({"error": {"message": "full up"}}))
        elif not body["stream"]:
            choice = {"text": "one two", "message": {"role": "assistant", "content": "one two"}}
            self.reply("application/json", json.dumps({"choices": [{"index": 0, **choice}]}))
        else:
            events: list[dict[str, Any]] = [
                {"choices": [{"index": 0, "text": text, "delta": {"content": text or None}}]}
                for text in ("one", " two", "")
            ]
            if self.server.event is not None:
                events[1:] = [self.server.event]
            lines = [*map(json.dumps, events), "[DONE]"]
            self.reply("text/event-stream", "".join(f"data: {line}\n\n" for line in lines))

    def reply(self, content_type: str, text: str) -> None:
        """Send it with the server's status."""
        self.send_response(self.server.status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def router() -> Iterator[Router]:
    """A running server."""
    with Router() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(address: str, way: Way) -> list[str]:
    """All pieces of one answer."""
    clients, missing = installed_clients(address)
    assert missing == [], "the development environment has both"
    return list(clients[way.client].pieces(ASK, way))


def test_there_are_four_ways_with_each_client() -> None:
    assert len({str(way) for way in WAYS}) == len(WAYS) == 8


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_way_asks_its_endpoint_and_reads_its_answer(router: Router, way: Way) -> None:
    pieces = ask(router.address, way)
    assert "".join(pieces) == "one two"
    assert (len(pieces) > 1) is way.is_streamed
    [(path, body)] = router.asked
    assert path == ("/v1/chat/completions" if way.is_chat else "/v1/completions")
    assert (body["stream"], body["temperature"], body["max_tokens"]) == (way.is_streamed, 0, 2)
    if way.is_chat:
        assert body["messages"][1] == {"role": "user", "content": "b"}
    else:
        assert body["prompt"] == "a b"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_refusal_is_an_error_with_the_routers_words(router: Router, way: Way) -> None:
    router.status = 429
    with pytest.raises(HttpError, match="full up"):
        ask(router.address, way)


@pytest.mark.parametrize("way", [way for way in WAYS if way.is_streamed], ids=str)
def test_error_in_mid_stream_is_an_error(router: Router, way: Way) -> None:
    router.event = {"error": {"message": "broken off", "type": "stream_error"}}
    with pytest.raises(HttpError, match="broken off"):
        ask(router.address, way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nobody_there_is_an_error(way: Way) -> None:
    with pytest.raises(HttpError):
        ask("127.0.0.1:1", way)


def test_missing_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    clients, missing = installed_clients("127.0.0.1:1")
    assert list(clients) == ["openai"]
    assert missing == ["the command curl"]
