"""The configuration keys of both services: name, type, default, limits and the reason for each.

Flags, TOML keys, environment names and docs/configuration.md are all derived from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEY = "tandem"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What the reference says of one key.

    Attributes:
        help: What it does, and why the default is what it is.
        unit: Unit of the value; empty for a pure name or switch.
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        choices: Allowed values; empty means any.
    """

    help: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


def key(
    default: Any,
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a configuration key."""
    info = KeyInfo(help=help, unit=unit, minimum=minimum, maximum=maximum, choices=choices)
    return field(default=default, metadata={KEY: info})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Keys that both services have."""

    model: str = key("", "Directory of a Hugging Face checkpoint. Required.")
    served_model_name: str = key("", "Name told to clients; empty means the directory's name.")
    dtype: str = key(
        "auto",
        "Type of weights and KV; auto takes the checkpoint's own.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = key("cpu", "Where the model runs.", choices=("cpu",))
    num_threads: int = key(
        1,
        "Threads inside one torch operator. One, because prefill and decode may share a machine.",
        unit="threads",
        minimum=1,
        maximum=1024,
    )
    host: str = key(
        "127.0.0.1", "Address to listen on. Others than loopback need TLS or --insecure."
    )
    port: int = key(0, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    insecure: bool = key(False, "Allow plaintext gRPC on an address other than loopback.")
    tls_cert: str = key("", "PEM file of the server's certificate chain.")
    tls_key: str = key("", "PEM file of the certificate's key.")
    tls_ca: str = key("", "PEM file of the authorities that peers' certificates must come from.")
    grpc_reflection: bool = key(False, "Serve gRPC reflection.")
    metrics_port: int = key(
        0, "Loopback port of the Prometheus endpoint; 0 serves none.", minimum=0, maximum=65535
    )
    log_level: str = key(
        "info", "Lowest level that is logged.", choices=("debug", "info", "warning", "error")
    )
    block_size: int = key(
        64, "Token rows in one KV block; both services need the same.", unit="tokens",
        minimum=1, maximum=1024,
    )  # fmt: skip
    num_kv_blocks: int = key(
        1024, "KV blocks in the pool.", unit="blocks", minimum=1, maximum=2**31 - 1
    )
    max_model_len: int = key(
        0, "Longest sequence; 0 takes what the model and the pool allow.", unit="tokens",
        minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    max_num_seqs: int = key(
        16, "Most sequences that run at once.", unit="sequences", minimum=1, maximum=4096
    )
    max_queued_requests: int = key(
        256, "Most requests that wait; more are refused with a retry delay.", unit="requests",
        minimum=1, maximum=2**20,
    )  # fmt: skip
    kv_engine: str = key(
        "shm",
        "How KV moves. shm needs both services on one host; mooncake goes between hosts; loopback "
        "is for tests in one process.",
        choices=("shm", "mooncake", "loopback"),
    )
    kv_host: str = key(
        "127.0.0.1",
        "Address of this host for the mooncake engine's peers, IPv4 or a name. On loopback its "
        "ports take loopback peers only.",
    )
    insecure_kv_network: bool = key(
        False,
        "Let mooncake's ports be reached from the network. They ask for no key: whoever reaches "
        "them can write into the staging rings. See docs/security.md.",
    )
    kv_protocol: str = key(
        "tcp", "Transport of the mooncake engine.", choices=("tcp", "rdma", "ascend")
    )
    kv_device: str = key(
        "", "Names of the transport's devices, comma-separated, e.g. mlx5_0; empty takes all."
    )
    kv_socket_dir: str = key(
        "",
        "Private directory (mode 0700) of the sockets that hand over shared memory; the same for "
        "both services. Empty means a directory named after the user below the temporary one.",
    )
    drain_grace_s: float = key(
        10.0, "How long running requests may go on after SIGTERM.", unit="seconds",
        minimum=0, maximum=3600,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ServiceConfig):
    """Keys of the prefill service."""

    max_num_batched_tokens: int = key(
        512,
        "Token budget of one step, over all prompts. Small steps keep cancels quick.",
        unit="tokens", minimum=1, maximum=2**20,
    )  # fmt: skip
    grant_timeout_s: float = key(
        10.0, "Longest wait for decode's grant after StartingSoon.", unit="seconds",
        minimum=0.1, maximum=600,
    )  # fmt: skip
    drain_timeout_s: float = key(
        5.0, "Longest wait of a unary Revoke for the end of writes.", unit="seconds",
        minimum=0.1, maximum=600,
    )  # fmt: skip
    event_timeout_s: float = key(
        60.0, "Longest wait of a push for the rows to be computed.", unit="seconds",
        minimum=0.1, maximum=3600,
    )  # fmt: skip
    connect_timeout_s: float = key(
        5.0, "Longest time to connect to a decode service's memory.", unit="seconds",
        minimum=0.1, maximum=600,
    )  # fmt: skip
    max_decode_sessions: int = key(
        64, "Most decode services that may push through this one.", unit="sessions",
        minimum=1, maximum=4096,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ServiceConfig):
    """Keys of the decode service."""

    prefill_address: tuple[str, ...] = key(
        (),
        "host:port of a prefill service; repeat for more. At least one is required, unless there "
        "is a `prefill-peers-file`.",
    )
    prefill_peers_file: str = key(
        "",
        "TOML file with more prefill services, `prefill-address = [...]`, read again whenever it "
        "changes. Empty means none.",
    )
    default_request_timeout_s: float = key(
        600.0, "Time limit of a request whose client sets none.", unit="seconds",
        minimum=1, maximum=86400,
    )  # fmt: skip
    default_max_tokens: int = key(
        0, "Output limit of a request that sets none; 0 means what fits the context.",
        unit="tokens", minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    prefill_wait_s: float = key(
        2.0, "Longest wait of a request for a usable prefill service.", unit="seconds",
        minimum=0, maximum=600,
    )  # fmt: skip
    prefill_silence_s: float = key(
        3.0,
        "Longest silence of a prefill service during a hand-off before it counts as stopped. It "
        "sends a heartbeat twice a second.",
        unit="seconds",
        minimum=1.0,
        maximum=600,
    )
    kv_staging_bytes: int = key(
        64 << 20,
        "Size of the staging ring of each prefill service, for engines that need one (mooncake).",
        unit="bytes", minimum=1 << 12, maximum=1 << 40,
    )  # fmt: skip
    kv_slot_bytes: int = key(
        2 << 20,
        "Size of one slot of a staging ring: the rows of a layer that one request moves.",
        unit="bytes", minimum=1 << 10, maximum=1 << 32,
    )  # fmt: skip
    lease_s: float = key(
        5.0, "How long a ticket lives without a Renew; prefill stops writing at 80 % of it.",
        unit="seconds", minimum=0.5, maximum=600,
    )  # fmt: skip
    renew_interval_s: float = key(
        0.5, "Time between two Renew messages.", unit="seconds", minimum=0.05, maximum=60
    )
    revoke_timeout_s: float = key(
        1.0, "Longest wait for Drained before blocks are quarantined.", unit="seconds",
        minimum=0.1, maximum=60,
    )  # fmt: skip
    reap_interval_s: float = key(
        0.2, "Time between two attempts to free quarantined blocks.", unit="seconds",
        minimum=0.01, maximum=60,
    )  # fmt: skip
    quarantine_cap_blocks: int = key(
        0, "Quarantined blocks above which a peer gets no ticket; 0 means a quarter of the pool.",
        unit="blocks", minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    max_unread_tokens: int = key(
        8192, "Tokens that may wait for a client to read them before its request is ended.",
        unit="tokens", minimum=1, maximum=2**20,
    )  # fmt: skip
    graph_capture: bool = key(True, "Replay captured decode steps; off runs every step eagerly.")
