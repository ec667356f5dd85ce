"""Prefill, decode and the smg router as processes, and plain HTTP to the router's OpenAI API."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tandem.launcher import Launcher, LaunchSettings, RunningServices
from tests.support.recording_decode import RequestLog

HTTP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A running router; `requests` tells what decode was asked by it, `pids` are by service."""

    model_dir: Path
    services: RunningServices
    requests: RequestLog
    pids: dict[str, int]

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.model_dir.name

    def client(self) -> openai.OpenAI:
        """The official client, without retries of its own; close it after use."""
        return openai.OpenAI(
            base_url=f"http://{self.services.router}/v1",
            api_key="none",
            max_retries=0,
            timeout=HTTP_TIMEOUT_S,
        )

    def post(self, path: str, **body: Any) -> Reply:
        """One POST; `model` is filled in."""
        connection = http.client.HTTPConnection(self.services.router, timeout=HTTP_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": self.model, **body}), headers)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(status=reply.status, headers=found, body=reply.read())
        finally:
            connection.close()


@contextlib.contextmanager
def running_api(
    model_dir: Path, work_dir: Path, *decode_arguments: str, **settings: Any
) -> Iterator[Api]:
    """Start everything and stop it in the end."""
    path = work_dir / "requests.jsonl"
    launch = LaunchSettings(
        model_dir=model_dir,
        router=True,
        num_threads=1,
        decode_module="tests.support.recording_decode",
        decode_arguments=(f"--record-requests={path}", *decode_arguments),
        **settings,
    )
    with Launcher(launch) as launcher:
        services = launcher.start()
        yield Api(
            model_dir=model_dir,
            services=services,
            requests=RequestLog(path),
            pids=launcher.pids(),
        )
