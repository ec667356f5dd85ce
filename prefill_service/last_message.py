"""What a job tells decode last, and what decode may conclude from it."""

from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb


def drained(ticket_id: bytes) -> pb.PrefillResponse:
    """Nothing is written under the ticket any more, as decode wished."""
    return pb.PrefillResponse(drained=pb.Drained(ticket_id=ticket_id))


def failed(failure: errors_pb2.Failure) -> pb.PrefillResponse:
    """The job failed, and nothing is written any more."""
    return pb.PrefillResponse(failed=pb.Failed(failure=failure))


def link_broken(message: pb.PrefillResponse, *, rank: int) -> pb.PrefillResponse:
    """The same, but bytes may still land: the engine failed, and cannot be fenced from here."""
    failure = errors_pb2.Failure(
        reason=errors_pb2.FAILURE_REASON_LINK_BROKEN,
        message="the link broke: bytes may still land",
        rank=rank,
    )
    if message.HasField("failed"):
        failure.message = f"{message.failed.failure.message}; {failure.message}"
        if message.failed.failure.HasField("layer"):
            failure.layer = message.failed.failure.layer
    return failed(failure)
