"""Weights of the wrong shape are refused by name; the joint up-projection splits as documented."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from attention_core.errors import AttentionConfigError
from attention_core.weights import split_kv_b
from tests.support.attention import random_weights, small_shape


def test_split_kv_b_takes_each_heads_key_channels_then_its_value_channels() -> None:
    shape = small_shape()
    key, value, latent = shape.qk_nope_head_dim, shape.v_head_dim, shape.kv_lora_rank
    joint = torch.arange(shape.num_heads * (key + value) * latent, dtype=torch.float32)
    joint = joint.view(-1, latent)
    w_uk_t, w_uv = split_kv_b(joint, shape)
    assert w_uk_t.is_contiguous()
    assert w_uv.is_contiguous()
    for head in range(shape.num_heads):
        first = head * (key + value)
        assert torch.equal(w_uk_t[head], joint[first : first + key])
        assert torch.equal(w_uv[head], joint[first + key : first + key + value].T)


def test_split_kv_b_copies_so_that_the_joint_weight_can_go() -> None:
    shape = small_shape()
    rows = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    joint = torch.ones(rows, shape.kv_lora_rank)
    w_uk_t, w_uv = split_kv_b(joint, shape)
    joint.zero_()
    assert w_uk_t.all()
    assert w_uv.all()


def test_split_kv_b_of_another_shape_names_it() -> None:
    shape = small_shape()
    with pytest.raises(AttentionConfigError, match="kv_b_proj"):
        split_kv_b(torch.ones(3, shape.kv_lora_rank), shape)


def test_native_weights_that_fit_validate_with_and_without_an_indexer() -> None:
    shape = small_shape()
    random_weights(shape, seed=0).validate(shape)
    random_weights(shape, seed=0, has_indexer=False).validate(shape)


def test_native_weights_with_any_tensor_misshapen_names_that_tensor() -> None:
    shape = small_shape()
    weights = random_weights(shape, seed=0)
    for field in fields(weights):
        if field.name == "indexer":
            continue
        wrong = replace(weights, **{field.name: getattr(weights, field.name)[:-1]})
        with pytest.raises(AttentionConfigError) as caught:
            wrong.validate(shape)
        assert caught.value.field == field.name


def test_indexer_weights_with_any_tensor_misshapen_names_that_tensor() -> None:
    shape = small_shape()
    weights = random_weights(shape, seed=0)
    assert weights.indexer is not None
    for field in fields(weights.indexer):
        tensor = getattr(weights.indexer, field.name)
        wrong = replace(weights.indexer, **{field.name: tensor[:-1]})
        with pytest.raises(AttentionConfigError) as caught:
            replace(weights, indexer=wrong).validate(shape)
        assert caught.value.field == f"indexer.{field.name}"
