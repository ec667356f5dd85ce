"""How rows of one layer become writes: straight into decode's blocks, or packed into a slot."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kv_transfer.errors import LayoutError
from kv_transfer.layout import KvLayout, RegionMap, StagingMap, placements, with_block_size
from kv_transfer.push_job import PushItem, PushJob
from kv_transfer.spans import CopySpan, Placement, byte_spans, check_block_ids, copy_spans


class PlannedWrite(NamedTuple):
    """One engine write, for which one receipt is sent.

    Attributes:
        component: What the receipt names; empty for all components of the layer.
        copies: The spans, in digest order.
        num_bytes: Their sum.
    """

    component: str
    copies: list[CopySpan]
    num_bytes: int


class PushPlan(Protocol):
    """Chosen once per pipeline."""

    @property
    def uses_slots(self) -> bool:
        """Whether an item needs a free slot of its ticket."""

    def check_slots(self, slots: Sequence[int]) -> None:
        """Refuse the slots of a ticket that cannot be written into.

        Raises:
            LayoutError: As said.
        """

    def max_rows(self, layer: int) -> int | None:
        """Return the most rows of a layer that one item may have; None for any number."""

    def writes(self, job: PushJob, item: PushItem) -> Sequence[PlannedWrite]:
        """Return the writes of an item in their order.

        Raises:
            LayoutError: The blocks end before the rows do.
        """


class DirectPlan:
    """Each component's rows go to their place in decode's pool."""

    uses_slots = False

    def __init__(
        self, source: RegionMap, target: RegionMap, layout: KvLayout, target_block_size: int
    ) -> None:
        """Join both regions.

        Raises:
            LayoutError: A region does not fit the layout.
        """
        self._layout = layout
        self._sources = placements(source, layout)
        self._targets = placements(target, with_block_size(layout, target_block_size))

    def check_slots(self, slots: Sequence[int]) -> None:
        """As the protocol says: there are none."""
        if slots:
            raise LayoutError("ticket.slots", f"{len(slots)} slots", "none: there is no ring")

    def max_rows(self, layer: int) -> int | None:  # noqa: ARG002  the protocol's
        """As the protocol says: any number."""
        return None

    def writes(self, job: PushJob, item: PushItem) -> list[PlannedWrite]:
        """As the protocol says: one per component."""
        return [
            PlannedWrite(
                component=component.name,
                copies=copy_spans(
                    self._sources[item.layer, component.name],
                    job.source_block_ids,
                    self._targets[item.layer, component.name],
                    job.ticket.block_ids,
                    item.rows,
                ),
                num_bytes=len(item.rows) * component.row_bytes,
            )
            for component in self._layout.layers[item.layer].components
        ]


class StagedPlan:
    """All components of a layer's rows go, one after the other, into one slot of the ring."""

    uses_slots = True

    def __init__(self, source: RegionMap, target: StagingMap, layout: KvLayout) -> None:
        """Take the ring.

        Raises:
            LayoutError: The source does not fit the layout, or a row does not fit a slot.
        """
        self._layout = layout
        self._sources: Mapping[tuple[int, str], Placement] = placements(source, layout)
        self._slot_bytes = target.slot_bytes
        self._num_slots = target.num_slots
        self._max_rows = target.rows_per_slot(layout)

    def check_slots(self, slots: Sequence[int]) -> None:
        """As the protocol says: at least one, each of them in the ring and once."""
        if not slots:
            raise LayoutError("ticket.slots", "empty", "at least one slot")
        check_block_ids("ticket.slots", slots, self._num_slots)

    def max_rows(self, layer: int) -> int | None:
        """As the protocol says: what fits a slot."""
        return self._max_rows[layer]

    def writes(self, job: PushJob, item: PushItem) -> list[PlannedWrite]:
        """As the protocol says: a single one."""
        assert item.slot is not None  # the board hands out no other item
        copies: list[CopySpan] = []
        start = at = item.slot * self._slot_bytes
        for component in self._layout.layers[item.layer].components:
            source = self._sources[item.layer, component.name]
            for span in byte_spans(source, job.source_block_ids, item.rows):
                copies.append(CopySpan(span.start, at, span.num_bytes))
                at += span.num_bytes
        return [PlannedWrite(component="", copies=copies, num_bytes=at - start)]
