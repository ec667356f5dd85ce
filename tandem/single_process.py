"""One process that generates by itself: the truth that a prefill and decode pair is compared with.

It uses the same model, strategies and sampler as the services, and none of their scheduling,
transfer or processes. Prompts are computed in chunks and decoded token by token on a paged cache
whose blocks are handed out in a shuffled order, so that nothing can rely on neighbouring blocks.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.decode_dsa import DsaDecode
from attention_core.paged_kv import PagedKvCache
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.prefill_dsa_cp import DsaCpPrefill
from attention_core.strategy import AttentionStrategy
from serving_core.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from serving_core.model.transformer import CausalLM
from serving_core.request import SamplingParams
from serving_core.sampler import SampleRequest, sample

_BLOCK_SHUFFLE_SEED = 20_240_607

TopkObserver = Callable[[int, Tensor, Tensor], None]
"""(layer, topk int32 [T, K], positions int64 [T]): what the rows of one step attended to."""


class SingleProcessEngine:
    """Generates for one request at a time.

    Args:
        model: the model, on the CPU.
        num_blocks: blocks of the cache; bounds prompt and output together.
        block_size: tokens in a block.
        chunk_tokens: most prompt tokens in one step.
    """

    def __init__(
        self, model: CausalLM, num_blocks: int, block_size: int, chunk_tokens: int
    ) -> None:
        if chunk_tokens < 1:
            raise InvalidRequestError("chunk_tokens", chunk_tokens, "at least 1")
        self._model = model
        self._cache = PagedKvCache.allocate(
            model.kv_components, num_blocks=num_blocks, block_size=block_size
        )
        self._block_ids = random.Random(_BLOCK_SHUFFLE_SEED).sample(range(num_blocks), num_blocks)
        self._chunk_tokens = chunk_tokens
        self._max_tokens = min(num_blocks * block_size, model.config.max_position_embeddings)
        kernels, device = CpuKernels(), CpuDevice()
        self._prefill = DsaCpPrefill(model.config.attention, kernels, device)
        self._decode = DsaDecode(model.config.attention, kernels, device)

    @property
    def cache(self) -> PagedKvCache:
        """The cache; its content is left as the last request wrote it."""
        return self._cache

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_topk: TopkObserver | None = None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> list[int]:
        """Generates until a stop token, `max_tokens`, or the end of the context.

        Args:
            prompt_token_ids: the prompt.
            sampling: as in a request to the services; `stop` strings need text and are refused.
            on_topk: called for every layer of every step.
            on_logits: called with the fp32 [V] logits that each token is sampled from.

        Returns:
            The new tokens, the stop token included if there was one.

        Raises:
            InvalidRequestError: names the field, its value and the limit.
        """
        max_tokens = self._check(prompt_token_ids, sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        end_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_ids.update(self._model.config.eos_token_ids)
        num_prompt = len(prompt_token_ids)
        hidden = self._compute_prompt(prompt_token_ids, on_topk)
        token_ids: list[int] = []
        while True:
            logits = self._model.logits(hidden)  # [1, V]
            if on_logits is not None:
                on_logits(logits[0])
            is_too_early = len(token_ids) < sampling.min_tokens
            request = SampleRequest(
                params=sampling,
                seed=seed,
                position=num_prompt + len(token_ids),
                banned_token_ids=tuple(sorted(end_ids)) if is_too_early else (),
            )
            token_ids += sample(logits, [request])
            if token_ids[-1] in end_ids or len(token_ids) == max_tokens:
                return token_ids
            num_computed = num_prompt + len(token_ids) - 1
            hidden = self._step(token_ids[-1:], num_computed, self._decode, on_topk)

    def _check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Refuses what cannot run; returns the most tokens that may be generated."""
        vocab_size = self._model.config.vocab_size
        sampling.validate(vocab_size)
        if sampling.stop:
            raise UnsupportedError("sampling_params.stop", sampling.stop, "empty: no text here")
        if not prompt_token_ids:
            raise InvalidRequestError("prompt_token_ids", "0 tokens", "at least 1 token")
        for token_id in prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                limit = f"in [0, {vocab_size - 1}]"
                raise InvalidRequestError("prompt_token_ids", token_id, limit)
        room = self._max_tokens - len(prompt_token_ids)
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if room < 1 or wanted > room:
            raise PromptTooLongError(
                "prompt_token_ids",
                f"{len(prompt_token_ids)} tokens and max_tokens {sampling.max_tokens}",
                f"at most {self._max_tokens} tokens together",
            )
        return wanted

    def _compute_prompt(self, token_ids: Sequence[int], on_topk: TopkObserver | None) -> Tensor:
        hidden = torch.empty(0)
        for start in range(0, len(token_ids), self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            hidden = self._step(chunk, start, self._prefill, on_topk)
        return hidden

    def _step(
        self,
        token_ids: Sequence[int],
        num_computed: int,
        strategy: AttentionStrategy,
        on_topk: TopkObserver | None,
    ) -> Tensor:
        """Computes the tokens after `num_computed`; returns the last one's hidden state [1, D]."""
        plan = self._plan(len(token_ids), num_computed)
        hidden = self._model.forward(
            torch.tensor(list(token_ids)),
            plan,
            self._cache,
            strategy,
            on_topk=None
            if on_topk is None
            else lambda layer, topk: on_topk(layer, topk, plan.positions),
        )
        return hidden[-1:]

    def _plan(self, num_queries: int, num_computed: int) -> AttentionPlan:
        num_blocks = -(-(num_computed + num_queries) // self._cache.block_size)
        span = QuerySpan(
            num_queries=num_queries,
            num_computed=num_computed,
            block_ids=self._block_ids[:num_blocks],
        )
        return build_plan([span], block_size=self._cache.block_size, rope=self._model.rope)
