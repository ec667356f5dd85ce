"""A service process for launcher tests: serves health, prints a ready line, misbehaves as told.

    python -m tests.support.fake_service --port=0 --kv-socket-dir=DIR --fake-record=DIR ...

Flags that it does not know are recorded and otherwise ignored, as real services have many.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

EXIT_STATUS = 7
LAST_WORDS = "the checkpoint has a missing tensor"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kv-socket-dir", default="")
    parser.add_argument("--fake-record", type=Path, required=True)
    parser.add_argument("--fake-fail", action="store_true", help="exit before ready")
    parser.add_argument("--fake-hang", action="store_true", help="never get ready")
    parser.add_argument("--fake-no-kv", action="store_true", help="ready, but cannot move KV")
    parser.add_argument("--fake-deaf", action="store_true", help="ignore SIGTERM")
    options, _ = parser.parse_known_args(arguments)
    return options


def _record(options: argparse.Namespace) -> None:
    """Writes what the launcher gave to this process."""
    socket_dir = Path(options.kv_socket_dir)
    seen = {
        "pid": os.getpid(),
        "arguments": sys.argv[1:],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "socket_dir_mode": socket_dir.stat().st_mode & 0o777 if socket_dir.is_dir() else None,
    }
    (options.fake_record / f"{os.getpid()}.json").write_text(json.dumps(seen))


def main() -> int:
    """Runs until SIGTERM."""
    options = _parse(sys.argv[1:])
    _record(options)
    if options.fake_fail:
        print("starting", LAST_WORDS, sep="\n", file=sys.stderr)
        return EXIT_STATUS
    # Blocked before any thread exists, so that sigwait below is the one that gets them.
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stop_signals, signal.SIGUSR1})
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    statuses = health_pb2.HealthCheckResponse
    kv = statuses.NOT_SERVING if options.fake_no_kv else statuses.SERVING
    servicer.set("tandem.kv", kv)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    if not options.fake_hang:
        print("a line that is not the ready line")
        ready = {"event": "ready", "role": "fake", "address": f"127.0.0.1:{port}"}
        print(json.dumps({**ready, "pid": os.getpid()}), flush=True)
    awaited = {signal.SIGUSR1} if options.fake_deaf else stop_signals
    signal.sigwait(awaited)
    server.stop(grace=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
