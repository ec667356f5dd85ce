"""Chooses the next token of each sequence; every choice is a pure function of its own row.

Greedy (temperature 0): the largest logit, the lowest id among equals. Otherwise, in this order and
in float64:

1. banned ids get probability 0;
2. logits are divided by the temperature, p = softmax;
3. min_p: tokens with p < min_p * max(p) are dropped;
4. top_k: the k most likely of the rest stay, lower ids first among equals;
5. top_p: of the rest, renormalised and sorted (most likely first, lower ids first among equals), a
   token stays while the mass before it is below top_p, so the most likely one always stays;
6. one uniform number in [0, 1) picks from the rest by inverse cumulative distribution, in order of
   ids.

The uniform is the first output of Philox4x64 with the seed as key and (position, sequence) in the
counter. No generator state exists, so any process that knows the seed makes the same choice, in any
batch and after any preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving_core.errors import ComputeError
from serving_core.request import SamplingParams

_SEED_MASK = (1 << 64) - 1
# A double has 53 bits of mantissa: the top 53 of 64 random bits, times 2^-53, lie in [0, 1).
_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One row's request.

    Attributes:
        params: the distribution; stop conditions are not looked at.
        seed: key of the random numbers; its low 64 bits count.
        position: index of the sampled token in the whole sequence, prompt included.
        sequence: which of several outputs of one prompt.
        banned_token_ids: ids that must not be chosen, such as end tokens before min_tokens.
    """

    params: SamplingParams
    seed: int
    position: int
    sequence: int = 0
    banned_token_ids: tuple[int, ...] = ()


def uniform(*, seed: int, position: int, sequence: int) -> float:
    """The random number in [0, 1) that belongs to one token of one sequence."""
    # The first counter word runs inside a stream, so streams of neighbours never overlap.
    counter = np.array([0, position, sequence, 0], dtype=np.uint64)
    key = np.array([seed & _SEED_MASK, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return float((bits >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS)


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    """Chooses one token a row.

    Args:
        logits: fp32 [N, V]; not changed.
        requests: one a row.

    Raises:
        ComputeError: a row has no finite logit that is allowed, or a NaN: the step computed
            nonsense, or everything is banned. Names the row.
    """
    assert logits.shape[0] == len(requests), "one request a row"
    if not requests:
        return []
    allowed = _without_banned(logits, requests)
    best = allowed.max(dim=-1).values  # NaN where a row has one
    usable = torch.isfinite(best).tolist()
    if not all(usable):
        row = usable.index(False)
        raise ComputeError(f"row {row} of the logits has a NaN, or no token that is allowed")
    greedy = allowed.argmax(dim=-1).tolist()
    return [
        token_id if request.params.temperature == 0 else _sample_row(row, request)
        for token_id, row, request in zip(greedy, allowed, requests, strict=True)
    ]


def token_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The exact distribution that a row is sampled from, for a temperature above 0.

    Args:
        logits: [V], banned ids at -inf.
        params: what shapes the distribution.

    Returns:
        float64 [V], sums to 1.
    """
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.min_p > 0:
        too_small = probabilities < params.min_p * probabilities.max()
        probabilities = probabilities.masked_fill(too_small, 0.0)
    if params.top_k > 0 or params.top_p < 1:
        probabilities = _most_likely(probabilities, params)
    return probabilities / probabilities.sum()


def _without_banned(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    rows = [row for row, request in enumerate(requests) for _ in request.banned_token_ids]
    if not rows:
        return logits
    columns = [token_id for request in requests for token_id in request.banned_token_ids]
    allowed = logits.clone()
    allowed[rows, columns] = float("-inf")
    return allowed


def _most_likely(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Applies top_k, then top_p."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    if params.top_k > 0:
        ordered[params.top_k :] = 0.0
    mass_before = ordered.cumsum(dim=-1) - ordered
    ordered[mass_before >= params.top_p * ordered.sum()] = 0.0
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def _sample_row(logits: Tensor, request: SampleRequest) -> int:
    cumulative = token_probabilities(logits, request.params).cumsum(dim=-1)
    number = uniform(seed=request.seed, position=request.position, sequence=request.sequence)
    # The last sum may round below 1; scaled by it, the number stays below the sum, and the first
    # sum above the number belongs to a token whose probability is not 0.
    threshold = cumulative.new_tensor([number]) * cumulative[-1]
    return int(torch.searchsorted(cumulative, threshold, right=True))
