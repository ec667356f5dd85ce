"""The two HTTP clients of the demo: the command `curl` and the official `openai` package.

Each asks the router's OpenAI API in four ways: completions and chat, streamed and not. A client
that is not installed is left out, and `installed_clients` says so.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 30.0
_DONE = "[DONE]"


class HttpError(Exception):
    """The router did not answer as it should; the message holds what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to ask.

    Attributes:
        client: "curl" or "openai".
        is_chat: Whether by the chat API; by completions otherwise.
        is_streamed: Whether the answer is streamed.
    """

    client: str
    is_chat: bool
    is_streamed: bool

    def __str__(self) -> str:
        """As the demo prints it."""
        endpoint = "chat" if self.is_chat else "completions"
        return f"{self.client} {endpoint}{', streamed' if self.is_streamed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A greedy request.

    Attributes:
        model: The served model's name.
        prompt: All of it, for completions.
        messages: (role, content) pairs that the chat template makes the same prompt of.
        max_tokens: Length of the answer.
    """

    model: str
    prompt: str
    messages: Sequence[tuple[str, str]]
    max_tokens: int

    def body(self, way: Way) -> dict[str, Any]:
        """The JSON object of the request."""
        if way.is_chat:
            messages = [{"role": role, "content": content} for role, content in self.messages]
            asked: dict[str, Any] = {"messages": messages}
        else:
            asked = {"prompt": self.prompt}
        return {
            "model": self.model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": way.is_streamed,
        }


class HttpClient(ABC):
    """A client of one router."""

    @abstractmethod
    def pieces(self, ask: Ask, way: Way) -> Iterator[str]:
        """Text of the answer as it comes.

        Raises:
            HttpError: The router refused, or cannot be reached.
        """


class CurlClient(HttpClient):
    """Runs `curl` once per request."""

    def __init__(self, router: str) -> None:
        """Ask the router at host:port."""
        self._router = router

    def pieces(self, ask: Ask, way: Way) -> Iterator[str]:
        """See HttpClient."""
        path = "chat/completions" if way.is_chat else "completions"
        command = [
            *("curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer"),
            *("--max-time", f"{_TIMEOUT_S:g}", f"http://{self._router}/v1/{path}"),
            *("--header", "Content-Type: application/json", "--data", json.dumps(ask.body(way))),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            lines = (line.decode().strip() for line in process.stdout)
            for text in _events(lines) if way.is_streamed else ["".join(lines)]:
                yield _piece(text, way)


def _events(lines: Iterable[str]) -> Iterator[str]:
    """Contents of server-sent events."""
    for line in lines:
        content = line.removeprefix("data: ")
        if content and content != _DONE:
            yield content


def _piece(text: str, way: Way) -> str:
    """Text of one JSON answer, or of one event of a streamed one."""
    try:
        choice = json.loads(text)["choices"][0]
        if not way.is_chat:
            return str(choice["text"])
        return choice["delta" if way.is_streamed else "message"].get("content") or ""
    except (ValueError, LookupError, TypeError) as error:
        # Not an answer, so it is what went wrong: the router's error or curl's own words.
        raise HttpError(f"curl: {text}") from error


class OpenAiClient(HttpClient):
    """Uses the `openai` package."""

    def __init__(self, router: str) -> None:
        """Ask the router at host:port."""
        import openai

        self._error: type[Exception] = openai.OpenAIError
        self._client = openai.OpenAI(
            base_url=f"http://{router}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S
        )

    def pieces(self, ask: Ask, way: Way) -> Iterator[str]:
        """See HttpClient."""
        resource: Any = self._client.chat.completions if way.is_chat else self._client.completions
        try:
            reply = resource.create(**ask.body(way))
            for part in reply if way.is_streamed else [reply]:
                choice = part.choices[0]
                if not way.is_chat:
                    yield choice.text
                elif way.is_streamed:
                    yield choice.delta.content or ""
                else:
                    yield choice.message.content or ""
        except self._error as error:
            raise HttpError(f"openai: {error}") from error


def installed_clients(router: str) -> tuple[dict[str, HttpClient], list[str]]:
    """Clients of the router at host:port by name, and what is missing for others, in words."""
    clients: dict[str, HttpClient] = {}
    missing: list[str] = []
    if shutil.which("curl"):
        clients["curl"] = CurlClient(router)
    else:
        missing.append("the command curl")
    if importlib.util.find_spec("openai"):
        clients["openai"] = OpenAiClient(router)
    else:
        missing.append("the Python package openai")
    return clients, missing


def all_ways(clients: Iterable[str]) -> list[Way]:
    """Every way to ask with these clients."""
    return [
        Way(client=client, is_chat=is_chat, is_streamed=is_streamed)
        for is_streamed in (True, False)
        for is_chat in (False, True)
        for client in clients
    ]
