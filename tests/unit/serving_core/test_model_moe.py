"""Router and routed experts against float64 references, and against transformers' router."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving_core.model.config import MoeShape
from serving_core.model.mlp import GatedMlp, RmsNorm
from serving_core.model.moe import MoeMlp, RoutedExperts, Router, Routing

WIDTH = 24
NUM_TOKENS = 37


def moe_shape(*, num_experts: int = 16, num_groups: int = 4, normalize: bool = True) -> MoeShape:
    return MoeShape(
        num_experts=num_experts,
        experts_per_token=3,
        intermediate_size=20,
        num_shared_experts=1,
        num_groups=num_groups,
        groups_per_token=max(num_groups // 2, 1),
        normalize_weights=normalize,
        scaling_factor=2.5,
    )


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_router(shape: MoeShape) -> Router:
    return Router(
        weight=random_tensor(shape.num_experts, WIDTH, seed=1),
        # Large enough to move choices, which the weights must not show.
        correction_bias=0.5 * random_tensor(shape.num_experts, seed=2),
        shape=shape,
    )


def random_experts(shape: MoeShape, dtype: torch.dtype = torch.float32) -> RoutedExperts:
    width = shape.intermediate_size
    return RoutedExperts(
        gate_up=random_tensor(shape.num_experts, 2 * width, WIDTH, seed=3).to(dtype) / 5,
        down=random_tensor(shape.num_experts, WIDTH, width, seed=4).to(dtype) / 5,
    )


def random_moe(shape: MoeShape) -> MoeMlp:
    shared = GatedMlp(
        gate_up=random_tensor(2 * shape.intermediate_size, WIDTH, seed=5) / 5,
        down=random_tensor(WIDTH, shape.intermediate_size, seed=6) / 5,
    )
    return MoeMlp(router=random_router(shape), experts=random_experts(shape), shared=shared)


def dense_weights(routing: Routing, num_experts: int) -> Tensor:
    """[T, E] weights, 0 where a token does not go."""
    zeros = torch.zeros(routing.expert_ids.shape[0], num_experts)
    return zeros.scatter(1, routing.expert_ids, routing.weights)


def reference_weights(router: Router, hidden: Tensor) -> Tensor:
    """The router as the paper states it, one token and one group at a time, in float64."""
    shape = router.shape
    group_size = shape.num_experts // shape.num_groups
    rows = torch.zeros(hidden.shape[0], shape.num_experts, dtype=torch.float64)
    for row, token in enumerate(hidden.double()):
        scores = [float(1 / (1 + torch.exp(-(w @ token)))) for w in router.weight.double()]
        choice = [s + float(b) for s, b in zip(scores, router.correction_bias, strict=True)]
        groups = [choice[start : start + group_size] for start in range(0, len(choice), group_size)]
        by_score = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g])[-2:]))
        kept = [
            expert
            for expert in range(shape.num_experts)
            if expert // group_size in by_score[: shape.groups_per_token]
        ]
        chosen = sorted(kept, key=lambda expert: -choice[expert])[: shape.experts_per_token]
        total = sum(scores[expert] for expert in chosen) if shape.normalize_weights else 1.0
        for expert in chosen:
            rows[row, expert] = scores[expert] / total * shape.scaling_factor
    return rows


def reference_experts(experts: RoutedExperts, hidden: Tensor, weights: Tensor) -> Tensor:
    """Every expert for every token, weighted, in float64."""
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert, (gate_up, down) in enumerate(
        zip(experts.gate_up.double(), experts.down.double(), strict=True)
    ):
        gate, up = (hidden.double() @ gate_up.T).chunk(2, dim=-1)
        rows = (gate * torch.sigmoid(gate) * up) @ down.T
        output += weights[:, expert : expert + 1].double() * rows
    return output


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_router_equals_float64_reference(num_groups: int, normalize: bool) -> None:
    shape = moe_shape(num_groups=num_groups, normalize=normalize)
    router = random_router(shape)
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    weights = dense_weights(router(hidden), shape.num_experts)
    expected = reference_weights(router, hidden)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)


def test_router_equals_transformers() -> None:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter

    shape = moe_shape()
    router = random_router(shape)
    config = DeepseekV32Config(
        hidden_size=WIDTH,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        n_group=shape.num_groups,
        topk_group=shape.groups_per_token,
        routed_scaling_factor=shape.scaling_factor,
    )
    theirs = DeepseekV32TopkRouter(config)
    theirs.load_state_dict(
        {"weight": router.weight, "e_score_correction_bias": router.correction_bias}
    )
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    with torch.no_grad():
        _, weights, expert_ids = theirs(hidden)
    expected = dense_weights(Routing(expert_ids=expert_ids, weights=weights), shape.num_experts)
    torch.testing.assert_close(dense_weights(router(hidden), shape.num_experts), expected)


def test_experts_equal_float64_reference() -> None:
    shape = moe_shape()
    router, experts = random_router(shape), random_experts(shape)
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    routing = router(hidden)
    expected = reference_experts(experts, hidden, dense_weights(routing, shape.num_experts))
    output = experts(hidden, routing)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_bfloat16_accumulate_in_float32() -> None:
    shape = moe_shape()
    experts = random_experts(shape, torch.bfloat16)
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7).bfloat16()
    routing = random_router(shape)(hidden)
    output = experts(hidden, routing)
    assert output.dtype == torch.float32
    expected = reference_experts(experts, hidden, dense_weights(routing, shape.num_experts))
    torch.testing.assert_close(output.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("num_first", [4, 5, 8])
def test_experts_of_two_ranks_sum_to_all(num_first: int) -> None:
    shape = moe_shape()
    experts = random_experts(shape)
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    routing = random_router(shape)(hidden)
    first = RoutedExperts(gate_up=experts.gate_up[:num_first], down=experts.down[:num_first])
    second = RoutedExperts(
        gate_up=experts.gate_up[num_first:],
        down=experts.down[num_first:],
        first_expert=num_first,
    )
    parts = first(hidden, routing), second(hidden, routing)
    assert all(part.abs().sum() > 0 for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], experts(hidden, routing))


def test_moe_zero_tokens_gives_zero_rows() -> None:
    assert random_moe(moe_shape())(torch.empty(0, WIDTH)).shape == (0, WIDTH)


def test_moe_nan_padding_reaches_no_other_row() -> None:
    moe = random_moe(moe_shape())
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    is_padding = torch.arange(NUM_TOKENS) % 3 == 2
    expected = moe(hidden)
    output = moe(hidden.masked_fill(is_padding.unsqueeze(1), float("nan")))
    torch.testing.assert_close(output[~is_padding], expected[~is_padding])
    assert output[is_padding].isnan().all()


def test_moe_output_is_routed_plus_unscaled_shared() -> None:
    moe = random_moe(moe_shape())
    hidden = random_tensor(NUM_TOKENS, WIDTH, seed=7)
    routed = moe.experts(hidden, moe.router(hidden))
    torch.testing.assert_close(moe(hidden), routed + moe.shared(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_it_multiplies(dtype: torch.dtype) -> None:
    hidden = (3 * random_tensor(NUM_TOKENS, WIDTH, seed=8)).to(dtype)
    norm = RmsNorm(weight=random_tensor(WIDTH, seed=9).to(dtype), eps=1e-5)
    wide = hidden.double()
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    output = norm(hidden)
    assert output.dtype == dtype
    expected = norm.weight * normed.to(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    else:
        # A last bit may differ where the fp32 norm lies between two bfloat16 numbers; rounding
        # once, after the product, would differ in a third of the elements.
        assert (output != expected).float().mean() < 0.01
