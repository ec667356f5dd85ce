"""Both strategies against the textbook layer: any chunking, batch, block table and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.decode_dsa import DsaDecode
from attention_core.errors import AttentionError
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.prefill_dsa_cp import DsaCpPrefill
from attention_core.shape import AttentionShape, RopeStyle
from attention_core.strategy import AttentionOutput, AttentionStrategy
from attention_core.weights import NativeWeights
from tests.support.attention import (
    poisoned_kv,
    random_hidden,
    random_kv_b_proj,
    random_weights,
    shuffled_blocks,
    small_rope,
    small_shape,
)
from tests.support.layer_oracle import OracleOutput, layer_oracle

BLOCK_SIZE, TOPK = 4, 8
LONG = 4 * TOPK + 3
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequence:
    """One sequence, its oracle and its blocks."""

    hidden: Tensor
    oracle: OracleOutput
    block_ids: Sequence[int]


class Bench:
    """A layer, a poisoned cache and sequences in shuffled blocks of it."""

    def __init__(
        self, lengths: Sequence[int], *, rope_style: RopeStyle = RopeStyle.HALF_SPLIT
    ) -> None:
        self.shape = small_shape(topk=TOPK, rope_style=rope_style)
        self.weights = random_weights(self.shape, seed=5)
        self.rope = small_rope(self.shape)
        per_sequence = -(-max(lengths) // BLOCK_SIZE)
        num_blocks = per_sequence * len(lengths) + 2
        self.kv = poisoned_kv(self.shape, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        blocks = shuffled_blocks(num_blocks, seed=3)
        kv_b_proj = random_kv_b_proj(self.shape, seed=5)
        self.sequences = []
        for i, length in enumerate(lengths):
            hidden = random_hidden(self.shape, length, seed=100 + i)
            oracle = layer_oracle(hidden, self.weights, kv_b_proj, self.shape, self.rope)
            own = blocks[i * per_sequence : (i + 1) * per_sequence]
            self.sequences.append(PagedSequence(hidden=hidden, oracle=oracle, block_ids=own))

    def strategy(self, kind: type[DsaCpPrefill] | type[DsaDecode]) -> AttentionStrategy:
        return kind(self.shape, CpuKernels(), CpuDevice())

    def plan(self, ranges: Sequence[tuple[int, int]], *, extra_rows: int = 0) -> AttentionPlan:
        """A step over tokens start..end of each sequence, with as many padding requests."""
        spans = [
            QuerySpan(num_queries=end - start, num_computed=start, block_ids=sequence.block_ids)
            for sequence, (start, end) in zip(self.sequences, ranges, strict=True)
        ]
        return build_plan(
            spans,
            block_size=BLOCK_SIZE,
            rope=self.rope,
            num_padded_tokens=sum(span.num_queries for span in spans) + extra_rows,
            num_padded_requests=len(spans) + extra_rows,
        )

    def rows(self, ranges: Sequence[tuple[int, int]], *, extra_rows: int = 0) -> Tensor:
        """The step's input, NaN in padding rows."""
        parts = [
            sequence.hidden[start:end]
            for sequence, (start, end) in zip(self.sequences, ranges, strict=True)
        ]
        padding = torch.full((extra_rows, self.shape.hidden_size), torch.nan)
        return torch.cat((*parts, padding))

    def step(
        self,
        strategy: AttentionStrategy,
        ranges: Sequence[tuple[int, int]],
        *,
        extra_rows: int = 0,
    ) -> AttentionOutput:
        plan = self.plan(ranges, extra_rows=extra_rows)
        hidden = self.rows(ranges, extra_rows=extra_rows)
        return run(strategy, hidden, self.weights, self.kv, plan)

    def check(self, output: AttentionOutput, ranges: Sequence[tuple[int, int]]) -> None:
        """Outputs and chosen sets are the oracle's; padding rows are 0 and -1."""
        row = 0
        for sequence, (start, end) in zip(self.sequences, ranges, strict=True):
            for token in range(start, end):
                chosen, expected = output.topk[row].tolist(), sequence.oracle.choices[token]
                assert sorted(chosen) == sorted(expected)
                torch.testing.assert_close(
                    output.hidden[row], sequence.oracle.hidden[token], **CLOSE
                )
                row += 1
        assert not output.hidden[row:].any()
        assert (output.topk[row:] == -1).all()


def run(
    strategy: AttentionStrategy,
    hidden: Tensor,
    weights: NativeWeights,
    kv: LayerKv,
    plan: AttentionPlan,
) -> AttentionOutput:
    prolog = strategy.write_kv(0, hidden, weights, kv, plan)
    return strategy.attend(prolog, weights, kv, plan, None)


@pytest.mark.parametrize("kind", [DsaCpPrefill, DsaDecode])
@pytest.mark.parametrize("rope_style", RopeStyle)
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, TOPK, LONG])
def test_strategy_over_a_whole_prompt_equals_the_textbook_layer(
    kind: type[DsaCpPrefill] | type[DsaDecode], rope_style: RopeStyle, length: int
) -> None:
    bench = Bench([length], rope_style=rope_style)
    output = bench.step(bench.strategy(kind), [(0, length)], extra_rows=2)
    bench.check(output, [(0, length)])


@pytest.mark.parametrize("kind", [DsaCpPrefill, DsaDecode])
@pytest.mark.parametrize("chunk", [1, 3, BLOCK_SIZE, TOPK + 1])
def test_strategy_chunk_by_chunk_equals_the_textbook_layer(
    kind: type[DsaCpPrefill] | type[DsaDecode], chunk: int
) -> None:
    bench = Bench([LONG])
    strategy = bench.strategy(kind)
    for start in range(0, LONG, chunk):
        ranges = [(start, min(start + chunk, LONG))]
        bench.check(bench.step(strategy, ranges, extra_rows=start % 2), ranges)


MIXED = Bench([LONG, 1, TOPK + 2, 17])


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_strategies_over_mixed_requests_in_any_chunks_equal_the_textbook_layer(
    data: st.DataObject,
) -> None:
    """Each sequence advances at its own pace; a request without tokens stays in the batch."""
    prefill, decode = MIXED.strategy(DsaCpPrefill), MIXED.strategy(DsaDecode)
    done = [0] * len(MIXED.sequences)
    while any(start < len(s.hidden) for start, s in zip(done, MIXED.sequences, strict=True)):
        sizes = [data.draw(st.sampled_from([0, 1, 1, 5, 50])) for _ in done]
        if not any(sizes):
            sizes = [1] * len(done)
        ranges = [
            (start, min(start + size, len(sequence.hidden)))
            for start, size, sequence in zip(done, sizes, MIXED.sequences, strict=True)
        ]
        strategy = data.draw(st.sampled_from([prefill, decode]))
        MIXED.check(MIXED.step(strategy, ranges, extra_rows=data.draw(st.integers(0, 2))), ranges)
        done = [end for _, end in ranges]


def test_prefill_within_topk_chooses_all_visible_keys_as_the_indexer_would() -> None:
    bench = Bench([TOPK, 3])
    ranges = [(0, TOPK), (0, 3)]
    prefill = bench.step(bench.strategy(DsaCpPrefill), ranges, extra_rows=1)
    decode = bench.step(bench.strategy(DsaDecode), ranges, extra_rows=1)
    assert prefill.topk[TOPK - 1].tolist() == list(range(TOPK))
    assert prefill.topk.sort().values.equal(decode.topk.sort().values)
    torch.testing.assert_close(prefill.hidden, decode.hidden, **CLOSE)


def test_interleaved_indexer_on_permuted_weights_equals_the_half_split_one() -> None:
    half = Bench([LONG])
    shape, index = half.shape, half.shape.indexer
    rope_dim = index.rope_head_dim
    # Channel c of the half-split order stands at 2c, and c + R/2 at 2c + 1.
    order = torch.arange(index.head_dim)
    order[:rope_dim] = order[:rope_dim].view(2, -1).T.flatten()
    indexer = half.weights.indexer
    assert indexer is not None
    per_head = indexer.wq_b.view(index.num_heads, index.head_dim, -1)
    weights = replace(
        half.weights,
        indexer=replace(
            indexer,
            wq_b=per_head[:, order].reshape(indexer.wq_b.shape),
            wk=indexer.wk[order],
            k_norm_weight=indexer.k_norm_weight[order],
            k_norm_bias=indexer.k_norm_bias[order],
        ),
    )
    interleaved = DsaCpPrefill(
        replace(shape, indexer=replace(index, rope_style=RopeStyle.INTERLEAVED)),
        CpuKernels(),
        CpuDevice(),
    )
    ranges = [(0, LONG)]
    output = run(interleaved, half.rows(ranges), weights, half.kv, half.plan(ranges))
    half.check(output, ranges)


def no_indexer(weights: NativeWeights) -> NativeWeights:
    return replace(weights, indexer=None)


@pytest.mark.parametrize("kind", [DsaCpPrefill, DsaDecode])
def test_layer_without_indexer_attends_over_the_shared_choice(
    kind: type[DsaCpPrefill] | type[DsaDecode],
) -> None:
    bench = Bench([LONG])
    strategy, plan = bench.strategy(kind), bench.plan([(0, LONG)])
    own = random_weights(bench.shape, seed=9)
    kv = poisoned_kv(
        bench.shape,
        num_blocks=bench.kv.latent.shape[0],
        block_size=BLOCK_SIZE,
        has_indexer=False,
    )
    hidden = bench.sequences[0].hidden
    shared = torch.tensor(bench.sequences[0].oracle.choices, dtype=torch.int32)
    prolog = strategy.write_kv(1, hidden, no_indexer(own), kv, plan)
    output = strategy.attend(prolog, no_indexer(own), kv, plan, shared)
    expected = layer_oracle(
        hidden,
        own,
        random_kv_b_proj(bench.shape, seed=9),
        bench.shape,
        bench.rope,
        choices=bench.sequences[0].oracle.choices,
    )
    torch.testing.assert_close(output.hidden, expected.hidden, **CLOSE)
    assert output.topk.equal(shared)


@pytest.mark.parametrize("kind", [DsaCpPrefill, DsaDecode])
def test_layer_without_indexer_and_without_a_shared_choice_names_the_layer(
    kind: type[DsaCpPrefill] | type[DsaDecode],
) -> None:
    bench = Bench([3])
    strategy, plan, weights = bench.strategy(kind), bench.plan([(0, 3)]), no_indexer(bench.weights)
    prolog = strategy.write_kv(7, bench.sequences[0].hidden, weights, bench.kv, plan)
    with pytest.raises(AttentionError, match="layer 7 has no indexer"):
        strategy.attend(prolog, weights, bench.kv, plan, None)


def test_layer_with_indexer_over_a_cache_without_index_keys_names_the_layer() -> None:
    bench = Bench([3])
    kv = LayerKv(latent=bench.kv.latent, rope=bench.kv.rope, index_key=None)
    with pytest.raises(AttentionError, match=r"layer 7 .* no index_key"):
        bench.strategy(DsaDecode).write_kv(
            7, bench.sequences[0].hidden, bench.weights, kv, bench.plan([(0, 3)])
        )


class EventLog(CpuDevice):
    """A device whose events note what the cache holds when they are recorded."""

    def __init__(self, kv: LayerKv) -> None:
        self.kv = kv
        self.snapshots: list[list[Tensor]] = []

    def new_event(self) -> _NotingEvent:
        return _NotingEvent(self)


class _NotingEvent:
    def __init__(self, log: EventLog) -> None:
        self._log, self._event = log, CpuDevice().new_event()

    def record(self) -> None:
        self._log.snapshots.append([tensor.clone() for tensor in cache_tensors(self._log.kv)])
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self, timeout_s: float) -> bool:
        return self._event.synchronize(timeout_s)


def cache_tensors(kv: LayerKv) -> list[Tensor]:
    assert kv.index_key is not None
    return [kv.latent, kv.rope, kv.index_key]


@pytest.mark.parametrize("kind", [DsaCpPrefill, DsaDecode])
def test_write_kv_records_its_event_once_after_the_last_cache_write_of_the_layer(
    kind: type[DsaCpPrefill] | type[DsaDecode],
) -> None:
    bench = Bench([LONG])
    log, plan = EventLog(bench.kv), bench.plan([(0, LONG)])
    strategy = kind(bench.shape, CpuKernels(), log)
    prolog = strategy.write_kv(2, bench.sequences[0].hidden, bench.weights, bench.kv, plan)
    assert prolog.written.layer == 2
    assert prolog.written.event.query()
    strategy.attend(prolog, bench.weights, bench.kv, plan, None)
    assert len(log.snapshots) == 1
    for at_event, at_end in zip(log.snapshots[0], cache_tensors(bench.kv), strict=True):
        torch.testing.assert_close(at_event, at_end, rtol=0, atol=0, equal_nan=True)
        written = at_event.flatten(0, 1).index_select(0, plan.slot_mapping)
        assert written.isfinite().all()


def test_write_kv_leaves_rows_of_other_sequences_alone() -> None:
    bench = Bench([6, 6])
    bench.step(bench.strategy(DsaDecode), [(0, 6), (0, 0)])
    for tensor in cache_tensors(bench.kv):
        written = tensor.isfinite().all(dim=-1)
        assert int(written.sum()) == 6
        assert not written[list(bench.sequences[1].block_ids)].any()


def test_zeroed_index_keys_change_the_choice() -> None:
    bench = Bench([LONG])
    strategy = bench.strategy(DsaDecode)
    bench.step(strategy, [(0, LONG - 1)])
    assert bench.kv.index_key is not None
    bench.kv.index_key.zero_()
    output = bench.step(strategy, [(LONG - 1, LONG)])
    assert sorted(output.topk[0].tolist()) != sorted(bench.sequences[0].oracle.choices[-1])


@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_decode_captured_once_and_replayed_equals_the_textbook_layer(num_sequences: int) -> None:
    """One graph of 3 rows serves 1 to 3 sequences, whatever their lengths."""
    lengths = [LONG, TOPK + 2, 5][:num_sequences]
    bench = Bench(lengths)
    strategy = bench.strategy(DsaDecode)
    bench.step(bench.strategy(DsaCpPrefill), [(0, 2)] * num_sequences)
    sizes = {"num_padded_tokens": 3, "num_padded_requests": 3, "max_blocks": 10}
    frozen = build_plan([], block_size=BLOCK_SIZE, rope=bench.rope, **sizes)
    hidden = torch.full((3, bench.shape.hidden_size), torch.nan)
    out = torch.empty_like(hidden)
    topk = torch.empty((3, TOPK), dtype=torch.int32)

    def step() -> None:
        output = run(strategy, hidden, bench.weights, bench.kv, frozen)
        out.copy_(output.hidden)
        topk.copy_(output.topk)

    graph = CpuDevice().capture(step)
    assert not out.any()
    for start in range(2, LONG):
        live = [i for i, length in enumerate(lengths) if start < length]
        ranges = [(start, start + 1) if i in live else (0, 0) for i in range(num_sequences)]
        spans = [
            QuerySpan(num_queries=1, num_computed=start, block_ids=bench.sequences[i].block_ids)
            for i in live
        ]
        frozen.load(build_plan(spans, block_size=BLOCK_SIZE, rope=bench.rope, **sizes))
        hidden.fill_(torch.nan)
        hidden[: len(live)] = bench.rows(ranges)
        graph.replay()
        bench.check(AttentionOutput(hidden=out, topk=topk), ranges)


def test_bf16_layer_stays_near_the_textbook_layer() -> None:
    bench = Bench([TOPK])  # every key is chosen: a flipped choice would not be rounding
    dtype = torch.bfloat16
    kv = poisoned_kv(bench.shape, num_blocks=4, block_size=BLOCK_SIZE, dtype=dtype)
    blocks = [QuerySpan(num_queries=TOPK, num_computed=0, block_ids=[3, 1])]
    plan = build_plan(blocks, block_size=BLOCK_SIZE, rope=bench.rope)
    hidden = bench.sequences[0].hidden.to(dtype)
    output = run(bench.strategy(DsaDecode), hidden, cast(bench.weights, dtype), kv, plan)
    assert output.hidden.dtype == dtype
    expected = bench.sequences[0].oracle.hidden
    worst = (output.hidden.float() - expected).abs().max() / expected.abs().max()
    assert worst < 3e-2


def cast(weights: NativeWeights, dtype: torch.dtype) -> NativeWeights:
    indexer = weights.indexer
    assert indexer is not None
    return NativeWeights(
        q_a_proj=weights.q_a_proj.to(dtype),
        q_a_norm=weights.q_a_norm.to(dtype),
        q_b_proj=weights.q_b_proj.to(dtype),
        kv_a_proj=weights.kv_a_proj.to(dtype),
        kv_a_norm=weights.kv_a_norm.to(dtype),
        w_uk_t=weights.w_uk_t.to(dtype),
        w_uv=weights.w_uv.to(dtype),
        o_proj=weights.o_proj.to(dtype),
        indexer=replace(
            indexer,
            wq_b=indexer.wq_b.to(dtype),
            wk=indexer.wk.to(dtype),
            k_norm_weight=indexer.k_norm_weight.to(dtype),
            k_norm_bias=indexer.k_norm_bias.to(dtype),
            weights_proj=indexer.weights_proj.to(dtype),
        ),
    )


def test_attention_shape_of_the_bench_has_no_equal_sizes_to_mix_up() -> None:
    shape: AttentionShape = small_shape()
    sizes = [
        shape.hidden_size,
        shape.q_lora_rank,
        shape.kv_lora_rank,
        shape.qk_nope_head_dim,
        shape.qk_rope_head_dim,
        shape.v_head_dim,
        shape.indexer.head_dim,
    ]
    assert len(set(sizes)) == len(sizes)
