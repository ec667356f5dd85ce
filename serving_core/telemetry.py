"""Metrics and logging.

Names that schedulers and dashboards already read from vLLM keep their names; what has none yet is
called tandem_*. Units are base units. Each service has its own registry: nothing is global.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import MutableMapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
)  # fmt: skip


class _ServiceMetrics:
    """What both services count. The label model_name is fixed per process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.num_requests_running = self._gauge(
            "vllm:num_requests_running", "Requests that compute now."
        )
        self.num_requests_waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests that wait to compute."
        )
        self.kv_cache_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1."
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.step_seconds = self._histogram("tandem_step_seconds", "Wall time of model steps.")
        self._rpcs = Counter(
            "tandem_rpc_handled",
            "Finished calls.",
            ["method", "code"],
            registry=self.registry,
        )
        self._rpc_seconds = Histogram(
            "tandem_rpc_seconds",
            "Time of calls.",
            ["method"],
            registry=self.registry,
            buckets=_LATENCY_BUCKETS,
        )

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """Count one call."""
        self._rpcs.labels(method, code).inc()
        self._rpc_seconds.labels(method).observe(seconds)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(
            name, text, ["model_name"], registry=self.registry, buckets=_LATENCY_BUCKETS
        )
        return histogram.labels(self._model_name)


class PrefillMetrics(_ServiceMetrics):
    """What the prefill service counts."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self.pushed_bytes = self._counter("tandem_kv_pushed_bytes", "Bytes written to decode.")
        self.queue_seconds = self._histogram(
            "vllm:request_queue_time_seconds", "Time from Start to the first computed chunk."
        )
        self.compute_seconds = self._histogram(
            "vllm:request_prefill_time_seconds", "Time from the first chunk to the sampled token."
        )
        self._jobs = Counter(
            "tandem_prefill_jobs", "Jobs by how they ended.", ["outcome"], registry=self.registry
        )

    def job_ended(self, outcome: str) -> None:
        """Count one job; outcomes are done, cancelled, and the names of failure reasons."""
        self._jobs.labels(outcome).inc()


class DecodeMetrics(_ServiceMetrics):
    """What the decode service counts."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self.generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.ttft_seconds = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from the request to its first token."
        )
        self.tpot_seconds = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of one request."
        )
        self.e2e_seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from the request to its end."
        )
        self.received_bytes = self._counter("tandem_kv_received_bytes", "Verified KV bytes.")
        self.exposed_transfer_seconds = self._histogram(
            "tandem_kv_exposed_transfer_seconds",
            "Time from the first sampled token to the commit of its KV.",
        )
        self.verify_seconds = self._histogram(
            "tandem_kv_verify_seconds", "Time to check the digest of one receipt."
        )
        self.quarantined_blocks = self._gauge(
            "tandem_kv_quarantined_blocks", "Blocks that a remote writer may still reach."
        )
        self.kv_fences = self._counter(
            "tandem_kv_fences", "Staging rings that were closed under a writer that did not end."
        )
        self.local_prefills = self._counter(
            "tandem_local_prefills", "Prompts that decode computed itself."
        )
        self.handoff_retries = self._counter(
            "tandem_handoff_retries", "Hand-offs that were tried again on a fresh ticket."
        )
        self.peers_file_invalid = self._gauge(
            "tandem_prefill_peers_file_invalid",
            "Whether the file of prefill services is wrong, so that older ones are kept.",
        )
        self.handoff_retries_denied = self._counter(
            "tandem_handoff_retries_denied",
            "Hand-offs that were not tried again because the retry budget was empty.",
        )
        self._add_labelled()

    def _add_labelled(self) -> None:
        self._requests = Counter(
            "vllm:request_success",
            "Requests by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._receipts_rejected = Counter(
            "tandem_receipts_rejected", "Receipts not accepted.", ["reason"], registry=self.registry
        )
        self._peers = Gauge(
            "tandem_prefill_peer_usable",
            "Whether KV can move from this prefill service.",
            ["address"],
            registry=self.registry,
        )
        self._breakers = Gauge(
            "tandem_prefill_breaker_state",
            "Breaker of this prefill service: 0 closed, 1 half open, 2 open.",
            ["address"],
            registry=self.registry,
        )
        self._handshakes = Counter(
            "tandem_handshakes", "Handshakes by outcome.", ["outcome"], registry=self.registry
        )

    def request_ended(self, finished_reason: str) -> None:
        """Count one request; reasons are stop, length, abort and error."""
        self._requests.labels(self._model_name, finished_reason).inc()

    def receipt_rejected(self, reason: str) -> None:
        """Count one receipt; the reason is the name of an error class."""
        self._receipts_rejected.labels(reason).inc()

    def peer_usable(self, address: str, is_usable: bool) -> None:
        """Set the state of one configured peer."""
        self._peers.labels(address).set(float(is_usable))

    def prefill_breaker(self, address: str, state: int) -> None:
        """Set the breaker of one configured peer: 0 closed, 1 half open, 2 open."""
        self._breakers.labels(address).set(state)

    def forget_prefill(self, address: str) -> None:
        """Show nothing more of a peer that left the configuration."""
        for gauge in (self._peers, self._breakers):
            with contextlib.suppress(KeyError):
                gauge.remove(address)

    def handshake_ended(self, outcome: str) -> None:
        """Count one handshake; outcomes are ok, mismatch and failed."""
        self._handshakes.labels(outcome).inc()


class MetricsServer:
    """The Prometheus endpoint on a loopback port."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry=registry)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that puts request_id and ticket_id on every line.

    Client ids are cut short and quoted, so that they can neither flood nor forge a log.
    """

    def __init__(self, logger: logging.Logger, *, request_id: str, ticket_id: str = "-") -> None:
        super().__init__(logger, {"request_id": request_id, "ticket_id": ticket_id})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Append both ids."""
        assert self.extra is not None
        # The message is a %-format: a percent sign of a client's id must not become a directive.
        request_id = str(self.extra["request_id"])[:64].replace("%", "_")
        return f"{msg} request_id={request_id!r} ticket_id={self.extra['ticket_id']}", kwargs


def set_up_logging(level: str) -> None:
    """Log to stderr, one event per line, from `level` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
