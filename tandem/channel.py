"""How both clients connect."""

from __future__ import annotations

DEFAULT_TIMEOUT_S = 600.0
METADATA_TIMEOUT_S = 10.0
"""Time limit of calls that only read metadata, in seconds."""

_MAX_MESSAGE_BYTES = 16 * 2**20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A service whose machine vanished is noticed during a call, after 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Two clients in one process must not share the fate of one connection.
    ("grpc.use_local_subchannel_pool", 1),
)

_MODEL_KEY = "x-tandem-model"


def call_metadata(model: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a generation; the protocol itself has no field for a model's name.

    Args:
        model: Name of the model that must be served; empty takes whatever is.
    """
    return ((_MODEL_KEY, model),) if model else ()
