"""Steps at awkward sizes for the operators, with poison wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from attention_core.backends.base import Device, Kernels
from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.plan import AttentionPlan, HostLens
from tests.reference.paging import Array, PagedRequest

NO_BLOCK = 2**30
"""In a block table where no block is: far outside every cache, so that its use cannot go unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of the operators under test.

    Attributes:
        name: For the test's id.
        kernels: Its operators.
        device: Where its tensors lie.
    """

    name: str
    kernels: Kernels
    device: Device


def all_backends() -> list[Backend]:
    """Every backend this machine can run; the CPU's also with tiles of a few rows and of one."""
    device = CpuDevice()
    return [
        Backend(name="cpu", kernels=CpuKernels(), device=device),
        Backend(name="cpu-small-tiles", kernels=CpuKernels(tile_elements=150), device=device),
        Backend(name="cpu-tiniest-tiles", kernels=CpuKernels(tile_elements=1), device=device),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A step: requests, padding and the pool their blocks are in.

    Attributes:
        requests: In row order; they may share blocks.
        num_padded_tokens: Rows behind the last query.
        num_padded_requests: Requests behind the last one.
        block_size: bs.
        num_blocks: nb.
        seed: Of the tensors' content.
    """

    requests: tuple[PagedRequest, ...]
    num_padded_tokens: int
    num_padded_requests: int
    block_size: int
    num_blocks: int
    seed: int

    @property
    def num_queries(self) -> int:
        """Rows that belong to a request."""
        return sum(request.query_len for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.num_queries + self.num_padded_tokens

    def generator(self) -> torch.Generator:
        """A fresh source of the content."""
        return torch.Generator().manual_seed(self.seed)


ONE_KEY = StepCase(
    requests=(PagedRequest(query_len=1, key_len=1, block_ids=(2,)),),
    num_padded_tokens=0,
    num_padded_requests=0,
    block_size=4,
    num_blocks=3,
    seed=0,
)
ALL_PADDING = StepCase(
    requests=(),
    num_padded_tokens=3,
    num_padded_requests=2,
    block_size=4,
    num_blocks=3,
    seed=0,
)
NOTHING_AT_ALL = StepCase(
    requests=(),
    num_padded_tokens=3,
    num_padded_requests=0,
    block_size=4,
    num_blocks=3,
    seed=0,
)
EMPTY_AMONG_OTHERS = StepCase(
    requests=(
        PagedRequest(query_len=0, key_len=0, block_ids=()),
        PagedRequest(query_len=5, key_len=9, block_ids=(4, 1, 3)),
        PagedRequest(query_len=0, key_len=4, block_ids=(1,)),
        PagedRequest(query_len=3, key_len=0, block_ids=()),
        PagedRequest(query_len=3, key_len=2, block_ids=(0,)),
        PagedRequest(query_len=1, key_len=5, block_ids=(1, 0)),
    ),
    num_padded_tokens=2,
    num_padded_requests=1,
    block_size=4,
    num_blocks=5,
    seed=1,
)


@st.composite
def step_cases(draw: st.DrawFn, *, max_requests: int = 4) -> StepCase:
    """Lengths of 0, 1 and a block more or less; few or no queries; any padding."""
    block_size = draw(st.sampled_from([1, 3, 4, 7]))
    edges = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size])
    key_lens = st.one_of(edges, st.integers(0, 17))
    num_blocks = -(-17 // block_size) + draw(st.integers(0, 3))
    requests = []
    for _ in range(draw(st.integers(0, max_requests))):
        key_len = draw(key_lens)
        # Drawn per request: two may hold the same block, as with a shared prefix.
        order = draw(st.permutations(range(num_blocks)))
        requests.append(
            PagedRequest(
                query_len=draw(st.one_of(st.integers(0, 2), st.just(key_len), st.integers(0, 9))),
                key_len=key_len,
                block_ids=tuple(order[: -(-key_len // block_size)]),
            )
        )
    return StepCase(
        requests=tuple(requests),
        num_padded_tokens=draw(st.integers(0, 3)),
        num_padded_requests=draw(st.integers(0, 2)),
        block_size=block_size,
        num_blocks=num_blocks,
        seed=draw(st.integers(0, 2**31)),
    )


def make_plan(
    case: StepCase,
    device: Device,
    *,
    slots: Sequence[int] | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> AttentionPlan:
    """The case's plan, built without build_plan so that every legal plan can occur.

    Args:
        case: The step.
        device: Where the tensors go.
        slots: T cache rows; None for -1 everywhere.
        cos: fp32 [T, R]; None for an operator that reads none.
        sin: Like cos.
    """
    padding = (0,) * case.num_padded_requests
    host = HostLens(
        query_lens=(*(request.query_len for request in case.requests), *padding),
        key_lens=(*(request.key_len for request in case.requests), *padding),
    )
    ends = np.cumsum(host.query_lens, dtype=np.int64).tolist()
    num_columns = 1 + max((len(request.block_ids) for request in case.requests), default=0)
    table = torch.full((len(host.key_lens), num_columns), NO_BLOCK, dtype=torch.int32)
    for row, request in enumerate(case.requests):
        for column, block_id in enumerate(request.block_ids):
            table[row, column] = block_id
    positions = [
        max(0, request.key_len - request.query_len + query)
        for request in case.requests
        for query in range(request.query_len)
    ]
    unused = torch.full((case.num_tokens, 2), torch.nan)
    return AttentionPlan(
        cum_query_lens=torch.tensor(ends, dtype=torch.int32, device=device.name),
        key_lens=torch.tensor(host.key_lens, dtype=torch.int32, device=device.name),
        block_table=table.to(device.name),
        slot_mapping=torch.tensor(
            [-1] * case.num_tokens if slots is None else slots,
            dtype=torch.int64,
            device=device.name,
        ),
        positions=torch.tensor(
            positions + [0] * case.num_padded_tokens, dtype=torch.int64, device=device.name
        ),
        cos=(unused if cos is None else cos).to(device.name),
        sin=(unused if sin is None else sin).to(device.name),
        host=host,
        block_size=case.block_size,
    )


def poison_padding_rows(case: StepCase, rows: Tensor) -> Tensor:
    """NaN in the rows [T, ...] that belong to no request, in place."""
    rows[case.num_queries :] = torch.nan
    return rows


def poison_unwritten_rows(case: StepCase, cache: Tensor) -> Tensor:
    """NaN in every row of cache [nb, bs, W] that holds no request's key, in place."""
    is_written = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
    for request in case.requests:
        for position in range(request.key_len):
            block_id = request.block_ids[position // case.block_size]
            is_written[block_id, position % case.block_size] = True
    cache[~is_written] = torch.nan
    return cache


def small_integers(
    shape: Sequence[int], generator: torch.Generator, *, highest: int, dtype: torch.dtype
) -> Tensor:
    """Integers in -highest .. highest: their sums are exact in fp32 in any order."""
    whole = torch.randint(-highest, highest + 1, tuple(shape), generator=generator)
    return whole.to(dtype)


def to_reference(tensor: Tensor) -> Array:
    """The tensor's values in float64."""
    values: Array = tensor.detach().cpu().double().numpy()
    return values


def normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Standard normal values, rounded to dtype."""
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def assert_same_but_for_rounding(actual: Tensor, expected: Array, dtype: torch.dtype) -> None:
    """Up to a few roundings of fp32, and one more where the result itself is bf16; NaN is NaN."""
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    np.testing.assert_allclose(to_reference(actual), expected, rtol=tolerance, atol=tolerance)
