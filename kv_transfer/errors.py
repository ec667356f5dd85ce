"""Everything that kv_transfer raises.

KvTransferError
├── LayoutError                an impossible layout, region or block list (field, value, limit)
├── IllegalTransitionError     a life-cycle step that the transition table does not have
├── EngineError
│   ├── EngineConfigError      a setting of an engine (field, value, limit)
│   ├── TargetAllocationError  the memory of a target cannot be had
│   ├── ConnectError           the target cannot be reached, or not in time
│   │   └── PeerRefusedError   it was reached, and one side does not accept the other
│   ├── WriteStoppedError      `should_stop` said so, or the link was closed
│   ├── WriteFaultError        the engine could not write
│   │   └── TargetBoundsError  a span leaves the target; nothing was written
│   └── PeerDeadError          the owner of the target is gone
├── PushError
│   ├── LeaseExpiredError      nobody renewed the ticket in time
│   ├── EventTimeoutError      the rows were not computed in time
│   ├── PushCrashedError       a callback or an event raised something unforeseen
│   ├── PushRefusedError       the job or its rows do not fit the pipeline (field, value, limit)
│   ├── PushQueueFullError     a bound of the pipeline is reached
│   └── PushClosedError        the pipeline is closed
├── TicketError
│   ├── StaleTicketError       no ticket of that id is live
│   └── TicketMacError         the ticket was not issued here
├── ReceiptError
│   ├── ReceiptFieldError      a field is outside the grant (field, value, limit)
│   ├── ReceiptOverlapError    rows were reported before
│   ├── ReceiptStateError      the reservation takes no receipts
│   └── DigestMismatchError    the memory does not hold what was sent
├── IncompleteError            commit before the receipts tile the grant
└── QuarantineFullError        too many blocks wait for the end of this peer's writers
"""

from typing import ClassVar


class KvTransferError(Exception):
    """Base of all errors of this package.

    Attributes:
        retryable: Whether a new attempt, with a new ticket, may succeed.
    """

    retryable: ClassVar[bool] = False


class FieldError(KvTransferError):
    """Mix-in base of the errors that name a field, its value and its limit."""

    def __init__(self, field: str, value: object, limit: object) -> None:
        """Keep the three for status mapping."""
        super().__init__(f"{field} is {value}, expected {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class LayoutError(FieldError):
    """A layout, a region or a block list that cannot be."""


class IllegalTransitionError(KvTransferError):
    """A life-cycle step that the transition table does not have."""

    def __init__(self, state: str, target: str) -> None:
        """Name the state and the refused successor."""
        super().__init__(f"no transition from {state} to {target}")
        self.state = state
        self.target = target


class EngineError(KvTransferError):
    """Base of what transfer engines raise."""


class EngineConfigError(EngineError, FieldError):
    """A setting of an engine is wrong."""


class TargetAllocationError(EngineError):
    """The memory of a target cannot be had."""


class ConnectError(EngineError):
    """The target cannot be reached, or not in time."""

    retryable = True


class PeerRefusedError(ConnectError):
    """The target was reached, and one side does not accept the other."""

    retryable = False


class WriteStoppedError(EngineError):
    """A write ended early because `should_stop` said so or the link was closed."""


class WriteFaultError(EngineError):
    """The engine could not write."""

    retryable = True


class TargetBoundsError(WriteFaultError):
    """A span leaves the target. Nothing was written."""

    retryable = False


class PeerDeadError(EngineError):
    """The owner of the target is gone, or has closed the target."""


class PushError(KvTransferError):
    """Base of what the push pipeline raises or reports."""


class LeaseExpiredError(PushError):
    """The writer stopped by itself because nobody renewed the ticket."""


class EventTimeoutError(PushError):
    """The rows of an item were not computed in time."""


class PushCrashedError(PushError):
    """A callback, an event or an engine raised something unforeseen; see its cause."""


class PushRefusedError(PushError, FieldError):
    """A job or its rows do not fit the pipeline."""


class PushQueueFullError(PushError):
    """A bound of the pipeline is reached."""

    retryable = True


class PushClosedError(PushError):
    """The pipeline is closed."""


class TicketError(KvTransferError):
    """Base of ticket faults."""


class StaleTicketError(TicketError):
    """No ticket of that id is live."""

    def __init__(self, ticket_id: bytes) -> None:
        """Name the ticket."""
        super().__init__(f"ticket {ticket_id.hex()} is not live here")
        self.ticket_id = ticket_id


class TicketMacError(TicketError):
    """The authentication code does not belong to the ticket."""

    def __init__(self, ticket_id: bytes) -> None:
        """Name the ticket, and never the code."""
        super().__init__(f"ticket {ticket_id.hex()} has a wrong authentication code")
        self.ticket_id = ticket_id


class ReceiptError(KvTransferError):
    """Base of receipt faults. Each of them ends the ticket."""


class ReceiptFieldError(ReceiptError, FieldError):
    """A field of a receipt is outside the grant."""


class ReceiptOverlapError(ReceiptError):
    """Rows of one component were reported before."""


class ReceiptStateError(ReceiptError):
    """The reservation takes no receipts in its state."""


class DigestMismatchError(ReceiptError):
    """The memory does not hold the bytes that were sent."""

    retryable = True

    def __init__(
        self, *, layer: int, component: str, rank: int, rows: object, sent: int, found: int
    ) -> None:
        """Name the place and both digests."""
        super().__init__(
            f"layer {layer} component {component} rank {rank} rows {rows}: "
            f"digest sent {sent:016x}, found {found:016x}"
        )
        self.layer = layer
        self.component = component
        self.rank = rank
        self.sent = sent
        self.found = found


class IncompleteError(KvTransferError):
    """Commit was asked for before the receipts tile the grant."""


class QuarantineFullError(KvTransferError):
    """Too many blocks wait for the proven end of one peer's writers."""

    retryable = True
