"""A request between its admission and its one terminal state.

WAITING --KV landed--> DECODING --> ENDED
   |                      |           ^
   +----------------------+-----------+
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from decode_service.request_output import RequestOutput
from decode_service.stop_rule import StopRule
from decode_service.timings import RequestTimings
from decode_service.token_stream import TokenStream
from serving_core.request import SamplingParams
from serving_core.telemetry import RequestLog

RequestNumber = NewType("RequestNumber", int)


class RequestPhase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that passed every check.

    Attributes:
        client_request_id: What the client calls it; only Abort looks at it.
        prompt_token_ids: The prompt.
        sampling: How tokens are chosen.
        seed: The client's, or one made for this request.
        stop_rule: When it ends.
        deadline_s: When its time is up, on the monotonic clock.
    """

    client_request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_rule: StopRule
    deadline_s: float

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenRequest:
    """A request that is being served; the event loop thread owns it.

    Attributes:
        number: Unique in this process; what all internal state goes by.
        request: What was asked.
        stream: Its tokens on their way to the client.
        output: Fills the stream.
        timings: When what happened.
        log: Names it on every line.
        phase: Where it is in its life.
        task: Drives it; set right after its creation.
    """

    number: RequestNumber
    request: ValidRequest
    stream: TokenStream
    output: RequestOutput
    timings: RequestTimings
    log: RequestLog
    phase: RequestPhase = RequestPhase.WAITING
    task: "asyncio.Task[None] | None" = field(default=None)
