"""Floors against counts made by hand and against real modules; the products of a forward against that forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from workbench.measure.kernel_times import time_calls
from workbench.measure.products import matrix_products
from workbench.measure.roofline import (
    Ceilings,
    attention_flops,
    forward_floor,
    kv_bytes,
    measure_ceilings,
    product_flops,
    weight_bytes,
)
from workbench.models.merge import merge_layer, merged_view
from workbench.models.packed import causal_rows
from workbench.models.shapes import SHAPES, Shape, random_target

TINY = Shape("tiny", "qwen3", 48, 3, 6, 2, 12, 64, 211, False, 1e4, max_position_embeddings=256)
CEILINGS = Ceilings(copy_bytes_per_s=4e12, read_bytes_per_s=5e12, matmul_flops_per_s=8e14, dtype="bfloat16")


# --- counts


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-4B", "Qwen3-8B"])
def test_weights_are_those_of_the_model(name):
    config = SHAPES[name].config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    counted = weight_bytes(config)
    matrices = sum(p.numel() * 2 for p in model.parameters() if p.dim() == 2)
    assert counted.whole == matrices
    assert counted.read == matrices - (0 if SHAPES[name].tied else config.vocab_size * config.hidden_size * 2)
    norms = sum(p.numel() * 2 for p in model.parameters()) - matrices
    assert 0 < norms < 1e-3 * counted.read


def test_sizes_of_the_8b_target():
    config = SHAPES["Qwen3-8B"].config()
    assert weight_bytes(config).read / 1e9 == pytest.approx(15.14, abs=0.01)
    assert weight_bytes(config).whole / 1e9 == pytest.approx(16.38, abs=0.01)
    assert weight_bytes(config, 4).read == 2 * weight_bytes(config).read
    assert kv_bytes(config, 1) == 147_456
    assert product_flops(config, 3) == 3 * weight_bytes(config).read
    assert product_flops(config, 3, logit_rows=1) == product_flops(config, 3) - 2 * 2 * 151_936 * 4096
    assert attention_flops(config, 10) == 10 * 36 * 32 * 128 * 4


def test_operations_are_those_of_a_forward():
    """Counted by torch on the model; its attention is dense, so every row attends all ten."""
    target = random_target(TINY, torch.float32)
    target.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        target.model(torch.arange(10)[None], use_cache=False)
    config = target.config
    assert counter.get_total_flops() == pytest.approx(
        product_flops(config, 10) + attention_flops(config, 10 * 10), rel=2e-3
    )


def test_floor_by_term():
    config = SHAPES["Qwen3-8B"].config()
    floor = forward_floor(config, 512, 1024, 32, CEILINGS)
    assert list(floor) == ["weights_s", "products_s", "kv_s", "attention_s", "floor_s"]
    assert floor["weights_s"] == pytest.approx(15.14e9 / 4e12, rel=1e-3)
    assert floor["products_s"] == pytest.approx(512 * 15.14e9 / 8e14, rel=1e-3)
    assert floor["kv_s"] == pytest.approx((32 * 1024 + 512) * 147_456 / 4e12)
    assert floor["attention_s"] == pytest.approx(512 * (1024 + 8.5) * 36 * 32 * 128 * 4 / 8e14)
    assert floor["floor_s"] == pytest.approx(floor["products_s"] + floor["kv_s"])
    one = forward_floor(config, 1, 0, 1, CEILINGS)
    assert one["kv_s"] == pytest.approx(147_456 / 4e12)
    assert one["floor_s"] == pytest.approx(one["weights_s"] + one["kv_s"])


def test_contexts_of_their_own():
    config = TINY.config()
    each = forward_floor(config, 6, [4, 10], 2, CEILINGS)
    assert each == pytest.approx(forward_floor(config, 6, 7, 2, CEILINGS))
    for rows, context, requests in ((1, 5, 2), (4, [3], 2), (4, -1, 2), (0, 0, 0), (4, [3, -1], 2)):
        with pytest.raises(ValueError, match=f"rows={rows}, requests={requests}"):
            forward_floor(config, rows, context, requests, CEILINGS)


def test_ceilings_of_this_machine():
    found = measure_ceilings("cpu", torch.float32, repeats=3)
    assert found.dtype == "float32"
    assert 1e8 < found.read_bytes_per_s < 1e13 and 1e8 < found.copy_bytes_per_s < 1e13
    assert 1e8 < found.matmul_flops_per_s < 1e14
    with pytest.raises(ValueError, match="device='meta'; allowed: cuda, cpu"):
        measure_ceilings("meta")


# --- products


@pytest.mark.parametrize("shape", [TINY, dataclasses.replace(TINY, family="llama", tied=True)], ids=["own", "tied"])
@pytest.mark.parametrize("merged", [False, True])
def test_products_are_all_of_a_forward(shape, merged):
    target = random_target(shape, torch.float32)
    products = matrix_products(target, 5, merged)
    assert len(products.weights) == 3 * (4 if merged else 7) + 1
    assert sum(4 * w.numel() for w in products.weights) == weight_bytes(target.config, 4).read
    with FlopCounterMode(display=False) as counter:
        logits = products()
    assert counter.get_total_flops() == product_flops(target.config, 5)
    assert logits.shape == (5, 211) and torch.equal(logits, products())
    assert float(logits.std()) > 1 and not torch.equal(logits, matrix_products(target, 5, merged, seed=1)())


def test_merged_weights_are_read_where_they_are():
    target = random_target(TINY, torch.bfloat16)
    apart = [w.clone() for w in matrix_products(target, 2).weights]
    layer = target.model.get_decoder().layers[1]
    assert merge_layer(layer) == 3
    merged = matrix_products(target, 2).weights
    assert all(torch.equal(a, b) for a, b in zip(apart, merged, strict=True))
    assert merged[4].data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    assert merged[6].data_ptr() == layer.mlp.gate_proj.weight.data_ptr()
    assert merged[0].data_ptr() != target.model.get_decoder().layers[0].self_attn.q_proj.weight.data_ptr()
    single = target.model.get_decoder().layers[0].mlp.down_proj.weight
    assert merged[3].data_ptr() == single.data_ptr(), "one matrix needs no copy"


def test_only_neighbours_in_order_are_viewed():
    whole = torch.arange(60.0).view(12, 5)
    a, b, c = whole.split([3, 4, 5])
    assert merged_view([a, b, c]).data_ptr() == whole.data_ptr() and torch.equal(merged_view([b, c]), whole[3:])
    for parts in ([b, a], [a, c], [a, b.clone()], [a, a], [whole[:, :2], whole[:, 2:4]], [a, b.view(5, 4)]):
        assert merged_view(parts) is None


def test_a_view_of_one_row_matrices_has_rows():
    """A matrix of a single row may have any stride there and still be contiguous."""
    whole = torch.arange(15.0)
    rows = [whole.as_strided((1, 5), (1, 1), 5 * place) for place in range(3)]
    assert torch.equal(merged_view(rows), whole.view(3, 5))
    target = random_target(dataclasses.replace(TINY, num_hidden_layers=1), torch.float32)
    mlp = target.model.get_decoder().layers[0].mlp
    for name, row in zip(("gate_proj", "up_proj"), rows, strict=False):
        module = torch.nn.Linear(5, 1, bias=False)
        module.weight = torch.nn.Parameter(row)
        setattr(mlp, name, module)
    merged = matrix_products(target, 2).weights[2]
    assert torch.equal(merged, whole[:10].view(2, 5)) and merged.data_ptr() == whole.data_ptr()


def test_products_refuse_what_they_do_not_know():
    target = random_target(TINY, torch.float32)
    with pytest.raises(ValueError, match="rows=0"):
        matrix_products(target, 0)
    del target.model.get_decoder().layers[2].mlp.up_proj
    with pytest.raises(ValueError, match="no linear up_proj"):
        matrix_products(target, 1)


# --- on the device


@pytest.mark.gpu
def test_nothing_beats_its_floor():
    ceilings = measure_ceilings("cuda")
    target = random_target("Qwen3-1.7B", device="cuda", num_layers=8)
    for rows in (1, 256):
        products = matrix_products(target, rows)
        measured = time_calls([products], target.device).median_us * 1e-6
        floor = forward_floor(target.config, rows, 0, 1, ceilings)
        assert measured > 0.85 * max(floor["weights_s"], floor["products_s"])
        assert measured < 6 * max(floor["weights_s"], floor["products_s"])
    assert ceilings.copy_bytes_per_s < 1.2 * ceilings.read_bytes_per_s
    rows = causal_rows([1, 2, 3], 0, 0, target.device)
    assert bool(target.forward(rows, target.new_cache(1, 3)).logits.isfinite().all())
