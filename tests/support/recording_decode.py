"""Entry point of a decode service that writes down every Generate message it gets.

Run as `python -m tests.support.recording_decode --record-requests=FILE [flags of the service]`.
Each line of the file is one GenerateRequest as protobuf's JSON, with the names of the .proto file.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.app import build
from decode_service.servicer import DecodeServicer
from serving_core.config import load_decode_config
from serving_core.service_process import run_service


class RequestLog:
    """Reads what such a service wrote; `new` returns each message once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0

    def new(self) -> list[pb.GenerateRequest]:
        """Messages since the last call, in the order of their arrival."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        found = [json_format.ParseDict(json.loads(x), pb.GenerateRequest()) for x in lines]
        new, self._num_read = found[self._num_read :], len(found)
        return new


def record_to(path: Path) -> None:
    """Make every servicer of this process write down its messages before it serves them."""
    serve = DecodeServicer.Generate
    file = path.open("w", encoding="utf-8")

    async def record_and_serve(self: DecodeServicer, request: Any, context: Any) -> None:
        line = json_format.MessageToDict(request, preserving_proto_field_name=True)
        file.write(json.dumps(line) + "\n")
        file.flush()
        await serve(self, request, context)

    DecodeServicer.Generate = record_and_serve  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    """Run the service; returns its exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--record-requests", type=Path, required=True)
    own, flags = parser.parse_known_args(argv)
    record_to(own.record_requests)
    return run_service("decode", load=partial(load_decode_config, flags), build=build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
