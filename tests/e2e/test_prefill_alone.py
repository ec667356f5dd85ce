"""The real prefill service against a scripted decode service: gRPC, engines and bytes are real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kv_transfer.engine.base import TransferEngine
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.shm import ShmEngine
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.request import SamplingParams
from tandem.single_process import SingleProcessEngine
from tests.support.eventually import until
from tests.support.fake_decode import cache_rows
from tests.support.prefill_harness import Gate, HookedModel, running_prefill

BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=["ds_yarn", "glm_shared"])
def model(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> CausalLM:
    return load_model(tiny_checkpoints[request.param], dtype=torch.float32)


@pytest.fixture(params=["loopback", "shm"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> TransferEngine:
    if request.param == "loopback":
        return LoopbackEngine()
    socket_dir = tmp_path / "kv"
    socket_dir.mkdir(mode=0o700)
    return ShmEngine(socket_dir)


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=num_tokens)


def one_shot(
    model: CausalLM, prompt: Sequence[int]
) -> tuple[int, dict[tuple[int, str], torch.Tensor]]:
    """First token and KV rows of a prompt that one process computes in one step."""
    engine = SingleProcessEngine(model, num_blocks=64, block_size=BLOCK_SIZE, chunk_tokens=4096)
    (token_id,) = engine.generate(
        prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    )
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    block_ids = engine._block_ids[:num_blocks]
    rows = {
        (layer, component.name): cache_rows(
            engine.cache, block_ids, layer, component.name, len(prompt)
        )
        for layer, components in enumerate(engine.cache.components)
        for component in components
    }
    return token_id, rows


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 131])
async def test_prefill_prompt_of_any_length_lands_as_one_shot(
    model: CausalLM, engine: TransferEngine, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    token_id, expected = one_shot(model, prompt)
    async with running_prefill(model, engine=engine, max_num_batched_tokens=32) as prefill:
        decode = prefill.decode
        result, reservation = await decode.prefill(decode.start(prompt))
        assert reservation.is_complete
        assert result.kinds[:2] == ["admitted", "starting_soon"]
        assert result.token_ids == [token_id]
        for (layer, component), rows in expected.items():
            torch.testing.assert_close(decode.rows(reservation, layer, component), rows)
        status = await decode.pool_status()
        assert status.num_pushed_bytes == sum(receipt.size_bytes for receipt in result.receipts)


async def test_prefill_two_long_prompts_chunked_together_land_as_one_shot(
    model: CausalLM,
) -> None:
    prompts = [prompt_of(101, seed=1), prompt_of(87, seed=2)]
    expected = [one_shot(model, prompt) for prompt in prompts]
    gate = Gate()
    steps: list[int] = []

    def hold_first_step(layer: int) -> None:
        steps.append(layer)
        if len(steps) == 1:
            gate.hold()

    async with running_prefill(
        HookedModel.of(model, hold_first_step), max_num_batched_tokens=40
    ) as prefill:
        decode = prefill.decode
        tasks = [asyncio.create_task(decode.prefill(decode.start(prompts[0])))]
        await until(lambda: gate.is_reached)
        tasks.append(asyncio.create_task(decode.prefill(decode.start(prompts[1]))))
        await until(lambda: prefill.num_computing == 2)
        gate.open()
        outcomes = await asyncio.gather(*tasks)
        for (result, reservation), (token_id, rows_of) in zip(outcomes, expected, strict=True):
            assert reservation.is_complete
            assert result.token_ids == [token_id]
            assert len({receipt.chunk for receipt in result.receipts}) >= 3
            for (layer, component), rows in rows_of.items():
                torch.testing.assert_close(decode.rows(reservation, layer, component), rows)
    # 188 tokens in steps of 40, the last of the first prompt shared with the second: 5 steps.
    assert len(steps) == 5 * len(model.layers)


async def test_prefill_receipts_of_layer_0_arrive_before_the_last_layer_is_computed(
    model: CausalLM,
) -> None:
    gate = Gate()
    last = len(model.layers) - 1
    hooked = HookedModel.of(model, lambda layer: gate.hold() if layer == last else None)
    async with running_prefill(hooked) as prefill:
        decode = prefill.decode
        handoff, reservation = await decode.granted(decode.start(prompt_of(20)))
        # The compute thread stands in the last layer until the test has seen the early receipts.
        while not any(receipt.layer == last - 1 for receipt in handoff.result.receipts):
            await handoff.until("progress")
        assert 0 in {receipt.layer for receipt in handoff.result.receipts}
        assert "first" not in handoff.result.kinds
        gate.open()
        result = await handoff.rest()
        for receipt in result.receipts:
            reservation.accept(receipt)
        assert reservation.is_complete


async def test_prefill_push_from_token_pushes_only_what_decode_lacks(model: CausalLM) -> None:
    prompt = prompt_of(70)
    token_id, expected = one_shot(model, prompt)
    async with running_prefill(model, max_num_batched_tokens=32) as prefill:
        decode = prefill.decode
        decode.cache.buffer.fill_(0x5A)
        result, reservation = await decode.prefill(
            decode.start(prompt, push_from_token=43, num_output_tokens=12)
        )
        assert reservation.is_complete
        assert result.token_ids == [token_id]
        assert min(receipt.rows.start for receipt in result.receipts) == 43
        for (layer, component), rows in expected.items():
            landed = cache_rows(
                decode.cache, reservation.ticket.block_ids, layer, component, len(prompt)
            )
            torch.testing.assert_close(landed[43:], rows[43:])
            assert bool((landed[:43].contiguous().view(torch.uint8) == 0x5A).all())


async def test_prefill_seeded_sampling_equals_single_process(model: CausalLM) -> None:
    prompt = prompt_of(40)
    sampling = SamplingParams(
        temperature=1.5, top_p=0.9, top_k=50, seed=1234, max_tokens=1, ignore_eos=True
    )
    single = SingleProcessEngine(model, num_blocks=64, block_size=BLOCK_SIZE, chunk_tokens=4096)
    expected = single.generate(prompt, sampling)
    async with running_prefill(model) as prefill:
        decode = prefill.decode
        start = decode.start(prompt)
        start.sampling.temperature = 1.5
        start.sampling.top_p = 0.9
        start.sampling.top_k = 50
        start.sampling.seed = 1234
        result, _ = await decode.prefill(start)
        assert result.token_ids == expected
        greedy, _ = await decode.prefill(decode.start(prompt))
        start = decode.start(prompt)
        start.sampling.banned_token_ids.extend(greedy.token_ids)
        other, _ = await decode.prefill(start)
        assert other.token_ids != greedy.token_ids
