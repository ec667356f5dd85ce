"""Completions through the router, one by one or as a steady load, and what became of each.

A streamed reply is complete only with a finish reason, [DONE] and no error event. Whoever did not
look at these could take a cut stream for a short answer, so that case has a name of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from time import monotonic
from types import TracebackType
from typing import Any, Self

_TIMEOUT_S = 30.0
_PAUSE_AFTER_FAILURE_S = 0.05
_READ_BYTES = 65536
_PREFIX = "data: "
_WORKER_HEADER = "x-smg-routed-worker-id"


class End(Enum):
    """How a request ended."""

    OPEN = "open"
    COMPLETE = "complete"
    REFUSED = "refused"  # without a token, and told so
    BROKEN = "broken"  # after some tokens, and told so
    SILENT = "silent"  # not complete, and nobody told the client


@dataclass(slots=True, kw_only=True)
class Reply:
    """What became of one request; times are monotonic seconds, 0 where it has not happened.

    Attributes:
        name: The x-request-id, which the services' logs carry on.
        question: Which of the prompts was asked.
        worker: host:port of the decode service whose answer this is; empty when none began one.
        error: What the client was told: an error event, an HTTP error or a broken connection.
    """

    name: str
    question: int
    sent_s: float = 0.0
    first_text_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    worker: str = ""
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    is_done: bool = False

    @property
    def end(self) -> End:
        """How it ended."""
        if not self.ended_s:
            return End.OPEN
        if self.error:
            return End.BROKEN if self.first_text_s else End.REFUSED
        return End.COMPLETE if self.is_done and self.finish_reason else End.SILENT

    @property
    def words(self) -> list[str]:
        """The answer, as far as it came."""
        return self.text.split()

    def take(self, event: dict[str, Any]) -> None:
        """Notes one event of the stream, or the whole answer."""
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice["text"] and not self.first_text_s:
                self.first_text_s = monotonic()


def completion_body(model: str, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion that runs to `max_tokens`; streamed unless `stream` says otherwise."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }


def send(connection: http.client.HTTPConnection, body: dict[str, Any], name: str) -> None:
    """Sends a completion request and does not wait for the answer."""
    headers = {"Content-Type": "application/json", "x-request-id": name}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)


@contextlib.contextmanager
def open_completion(
    router: str, body: dict[str, Any], name: str
) -> Iterator[http.client.HTTPConnection]:
    """A request under way; leaving the block disconnects, however much was read."""
    connection = http.client.HTTPConnection(router, timeout=_TIMEOUT_S)
    try:
        send(connection, body, name)
        yield connection
    finally:
        # A response that was not read to its end keeps the socket open beyond `close`.
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def read_texts(connection: http.client.HTTPConnection, number: int) -> list[str]:
    """Reads that many events with text of a streamed answer, and no more."""
    response = connection.getresponse()
    texts: list[str] = []
    while len(texts) < number:
        line = response.readline().decode().strip()
        assert line != f"{_PREFIX}[DONE]", "the answer ended too early"
        if line.startswith(_PREFIX):
            texts += [one["text"] for one in json.loads(line.removeprefix(_PREFIX))["choices"]]
    return texts


def ask(router: str, body: dict[str, Any], reply: Reply) -> Reply:
    """Runs one completion to its end, whatever the end is, and notes it in `reply`."""
    reply.sent_s = monotonic()
    connection = http.client.HTTPConnection(router, timeout=_TIMEOUT_S)
    try:
        send(connection, body, reply.name)
        response = connection.getresponse()
        reply.status = response.status
        reply.worker = (response.getheader(_WORKER_HEADER) or "").removeprefix("grpc://")
        if response.status != HTTPStatus.OK:
            reply.error = response.read().decode()
        elif body["stream"]:
            _read_events(response, reply)
        else:
            reply.take(json.loads(response.read()))
            reply.is_done = True
    except (OSError, http.client.HTTPException) as error:
        reply.error = reply.error or f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        reply.ended_s = monotonic()
    return reply


def _read_events(response: http.client.HTTPResponse, reply: Reply) -> None:
    for text in _lines(response):
        if text == f"{_PREFIX}[DONE]":
            reply.is_done = True
        elif text.startswith(_PREFIX):
            reply.take(json.loads(text.removeprefix(_PREFIX)))


def _lines(response: http.client.HTTPResponse) -> Iterator[str]:
    """The body's lines; unlike `readline`, `read1` raises when the connection ends too early."""
    rest = b""
    while piece := response.read1(_READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode().strip() for line in lines)


@dataclass(kw_only=True)
class SteadyLoad:
    """Clients that ask one question after the other until the block ends.

    Attributes:
        router: host:port.
        bodies: What is asked, in turn.
        num_clients: Requests at once.
        replies: All requests so far, those under way included.
    """

    router: str
    bodies: Sequence[dict[str, Any]]
    num_clients: int
    replies: list[Reply] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        """Starts the clients."""
        self._threads = [
            threading.Thread(target=self._run, name=f"client-{index}")
            for index in range(self.num_clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the load."""
        self.finish()

    def finish(self) -> None:
        """Waits until each client has the end of its last request; no more are sent."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def count(self, condition: Callable[[Reply], bool]) -> int:
        """How many requests so far are such."""
        return sum(condition(reply) for reply in list(self.replies))

    def num_streaming(self, worker: str = "") -> int:
        """Requests in the middle of their answer, of one decode service or of all."""
        return self.count(
            lambda one: one.end is End.OPEN and one.first_text_s > 0 and worker in ("", one.worker)
        )

    def num_complete(self, *, sent_after_s: float, worker: str = "") -> int:
        """Complete answers to requests sent after a moment, of one decode service or of all."""
        return self.count(
            lambda one: (
                one.end is End.COMPLETE and one.sent_s > sent_after_s and worker in ("", one.worker)
            )
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            reply = self._next_reply()
            ask(self.router, self.bodies[reply.question], reply)
            if reply.end is not End.COMPLETE:
                self._stop.wait(_PAUSE_AFTER_FAILURE_S)

    def _next_reply(self) -> Reply:
        with self._lock:
            number = len(self.replies)
            question = number % len(self.bodies)
            self.replies.append(Reply(name=f"load-{number:05d}", question=question))
            return self.replies[-1]
