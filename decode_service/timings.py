"""What a client is told about the time its request took.

The protocol has no field for it, so it travels as a small JSON object in the trailing metadata of
Generate, under the key `tandem-timings-json`. All times are in seconds:

    ttft_s               from the arrival of the request to its first token
    tpot_s               mean time between two tokens after the first; absent below two tokens
    e2e_s                from the arrival of the request to its end
    prefill_queue_s      from Start to the first computed chunk, measured by prefill
    prefill_compute_s    from the first chunk to the first token, measured by prefill
    exposed_transfer_s   from the arrival of the first token to the commit of its KV
    num_pushed_bytes     verified bytes of KV
"""

import json
from dataclasses import dataclass

from decode_service.handoff import LandedKv

TIMINGS_KEY = "tandem-timings-json"


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """Monotonic times of one request; filled as it goes.

    Attributes:
        arrived_s: When it came.
        first_token_s: When its first token was there; None before.
        last_token_s: When its newest token was there; None before.
        landed: What prefill told; None before.
    """

    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    landed: LandedKv | None = None

    def to_json(self, *, now_s: float, num_output_tokens: int) -> str:
        """Return the JSON object; what is not known is left out."""
        values: dict[str, float] = {"e2e_s": now_s - self.arrived_s}
        if self.first_token_s is not None and self.last_token_s is not None:
            values["ttft_s"] = self.first_token_s - self.arrived_s
            if num_output_tokens > 1:
                decoding_s = self.last_token_s - self.first_token_s
                values["tpot_s"] = decoding_s / (num_output_tokens - 1)
        if self.landed is not None:
            values["prefill_queue_s"] = self.landed.queue_time_s
            values["prefill_compute_s"] = self.landed.compute_time_s
            values["exposed_transfer_s"] = self.landed.exposed_transfer_s
            values["num_pushed_bytes"] = self.landed.pushed_bytes
        return json.dumps({name: round(value, 6) for name, value in values.items()})
