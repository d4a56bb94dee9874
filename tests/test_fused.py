"""Fused layers against the model's own, and which layers may be fused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from drafter_zoo import stock_model, tile_twin
from forward_setup import assert_alike, error, fresh, rounds, small
from test_target import SMALL, random_tree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Gemma2Config,
    GemmaConfig,
    HeliumConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

from workbench.decode.rows import Workspace, pack_chunks
from workbench.measure.kernel_times import worst_row_error
from workbench.models import fused as fused_module
from workbench.models.adapt import quicken
from workbench.models.forwards import ForwardReport, SwitchedForward
from workbench.models.fused import _cut_pays, fuse_model, layer_weights, product_in_halves, unfuse_model
from workbench.models.target import Target


def test_fused_equals_stock(target):
    fused = fresh(target)
    assert fused.forward_report.kind == "fused" and fused.forward_report.merged == 3 * target.num_layers
    assert_alike(fused, tile_twin(target), 1e-5)


def test_products_in_halves_equal_stock(target, monkeypatch):
    """What a GPU does with few rows of large matrices."""
    halves = []
    monkeypatch.setattr(fused_module, "_cut_pays", lambda x, weight: not halves.append(weight.shape))
    assert_alike(fresh(target), tile_twin(target), 1e-5)
    assert len(halves) > 2 * target.num_layers and len(set(halves)) == 2


def cut(
    rows: int = 60,
    inner: int = 4096,
    outputs: int = 4096,
    strides: tuple[int, int] = (1, 1),
    device: str = "cuda",
    dtype: torch.dtype = torch.float16,
) -> bool:
    """Whether such a product is cut, told of tensors without memory; strides of x and weight within a row."""
    with FakeTensorMode():
        x, weight = (
            torch.empty_strided((size, inner), (inner * stride, stride), device=device, dtype=dtype)
            for size, stride in zip((rows, outputs), strides, strict=True)
        )
        return _cut_pays(x, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_rows_of_large_matrices_are_cut_up_to_the_bounds(dtype):
    for rows in (2, 60, 128):
        assert cut(rows, dtype=dtype)
    assert cut(256, inner=8192, dtype=dtype)
    assert cut(inner=2000, outputs=4000, dtype=dtype)
    assert not cut(inner=2000, outputs=3999, dtype=dtype)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"device": "cpu"}, id="on a CPU"),
        pytest.param({"dtype": torch.float32}, id="float32"),
        pytest.param({"rows": 1}, id="one row"),
        pytest.param({"rows": 129}, id="too many rows"),
        pytest.param({"rows": 256, "inner": 8176}, id="too many rows for what is less than twice as long"),
        pytest.param({"rows": 257, "inner": 8192}, id="too many rows even so"),
        pytest.param({"inner": 4104}, id="halves whose rows do not begin at 16 bytes"),
        pytest.param({"strides": (2, 1)}, id="x with gaps"),
        pytest.param({"strides": (1, 2)}, id="weight with gaps"),
    ],
)
def test_products_that_are_not_cut(change):
    assert cut() and not cut(**change)


def assert_halves_right(rows: int, inner: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = torch.randn(outputs, inner, generator=generator).to(device, dtype)
    found = product_in_halves(x, weight)
    assert found.dtype == torch.float32 and found.shape == (2, rows, outputs) and found.is_contiguous()
    pairs = zip(x.double().chunk(2, 1), weight.double().chunk(2, 1), strict=True)
    exact = torch.stack([left @ right.t() for left, right in pairs]).flatten(0, 1)
    # Products of two half precision numbers are exact in float32, so what is lost is lost in summing. Matrix units cut
    # their running sum off where float32 ends, some 130 times, always towards zero: 4e-6 is to be expected of that. To
    # round a part to half precision on the way costs 2e-4 at the least, and the norm behind must not see it.
    parts = found.flatten(0, 1)
    assert worst_row_error(parts, exact) <= 5e-5 < worst_row_error(parts.to(dtype), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_equal_float64(dtype):
    for rows, inner, outputs in ((2, 32, 40), (5, 2, 8), (60, 96, 33)):
        assert_halves_right(rows, inner, outputs, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [4096, 4104])
@pytest.mark.parametrize("rows", [2, 60, 256])
def test_halves_on_cuda_equal_float64(rows, outputs, dtype):
    """Outputs that fill whole tiles, and some that do not."""
    assert_halves_right(rows, 4096, outputs, dtype, "cuda")


def test_a_stream_that_is_changed_between_layers_is_normed_anew(tiny_qwen3):
    """The norm that a layer made for the next one is of a stream that no longer counts."""

    def doubled(target):
        layer = target.model.get_decoder().layers[0]
        handle = layer.register_forward_hook(lambda module, given, hidden: hidden.roll(1, -1))
        found = rounds(target)
        handle.remove()
        return found

    fused, twin = fresh(tiny_qwen3), tile_twin(tiny_qwen3)
    changed, plain = doubled(fused), rounds(fused)
    for got, wanted, before in zip(changed, doubled(twin), plain, strict=True):
        assert error(got, wanted) < 1e-5 < error(got, before)


def test_layers_that_are_passed_over_or_change_places(tiny_qwen3):
    """A norm made for the layer that should have come next is not another one's."""

    def passed_over(layers):
        layers[1].forward = lambda hidden_states, **_: hidden_states

    def swapped(layers):
        layers[1].forward, layers[2].forward = layers[2].forward, layers[1].forward

    for change in (passed_over, swapped):
        fused, twin = fresh(tiny_qwen3), tile_twin(tiny_qwen3)
        plain = rounds(twin)[0]
        for target in (fused, twin):
            change(target.model.get_decoder().layers)
        wanted = rounds(twin)[0]
        assert error(rounds(fused)[0], wanted) < 1e-5 < error(plain, wanted)


def test_fused_model_takes_other_weights(tiny_qwen3):
    """Weights stay the model's: their names, their values, and what is loaded into them later."""
    fused = fresh(tiny_qwen3)
    state = tiny_qwen3.model.state_dict()
    found = fused.model.state_dict()
    assert list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)
    other = {name: value + 0.02 * torch.randn(value.shape) for name, value in state.items()}
    fused.model.load_state_dict(other)
    twin = tile_twin(tiny_qwen3)
    twin.model.load_state_dict(other)
    assert_alike(fused, twin, 1e-5)


def test_unfused_is_the_model_again(target):
    twin = tile_twin(target)
    expected, report = rounds(twin), ForwardReport("fused")
    assert fuse_model(twin.model, report)
    unfuse_model(twin.model)
    decoder = twin.model.get_decoder()
    assert not any(isinstance(layer.forward, SwitchedForward) for layer in decoder.layers)
    assert "forward" not in vars(decoder.norm) and "forward" not in vars(decoder.rotary_emb)
    for found, stock in zip(rounds(twin), expected, strict=True):
        torch.testing.assert_close(found, stock, rtol=0, atol=1e-6, equal_nan=True)
    assert fuse_model(twin.model, ForwardReport("fused"))  # and can be fused anew


@pytest.mark.parametrize("attention", ["plain", "tile"])
def test_stock_targets_of_a_fused_model(attention, tiny_llama):
    """Another target of the same model may run its own operations, also plain ones."""
    fused = fresh(tiny_llama)
    stock = Target(fused.model, stop_ids=(), attention=attention, forward="stock")
    assert stock.forward_report is None
    calls = []
    for layer in fused.model.get_decoder().layers:
        fast = layer.forward.fast
        layer.forward.fast = lambda *a, fast=fast, **k: calls.append(0) or fast(*a, **k)
    assert_alike(stock, tiny_llama, 1e-5)
    assert not calls
    assert_alike(fused, tiny_llama, 1e-5)
    assert len(calls) == 4 * fused.num_layers


def test_a_copy_of_a_fused_model_runs(tiny_qwen3):
    fused = fresh(tiny_qwen3)
    copied = Target(copy.deepcopy(fused.model), stop_ids=(), attention="tile", forward="fused")
    assert copied.forward_report.kind == "fused"
    assert_alike(copied, fused, 1e-6)


@pytest.mark.parametrize("change", ["copied", "moved", "assigned"])
def test_weights_that_went_elsewhere_are_noticed(change, tiny_qwen3):
    """A fused forward holds views of weights; old ones would be used without a word."""
    fused = fresh(tiny_qwen3)
    stock = Target(fused.model, stop_ids=(), attention="tile", forward="stock")
    other = {name: value + 0.02 * torch.randn(value.shape) for name, value in fused.model.state_dict().items()}
    if change == "copied":
        fused.model = stock.model = copy.deepcopy(fused.model)
        fused.model.load_state_dict(other)
    elif change == "assigned":
        fused.model.load_state_dict(other, assign=True)
    else:
        fused.model.bfloat16()
    for target in (fused, stock):
        with pytest.raises(ValueError, match="were moved or replaced after the model was fused"):
            rounds(target)
    if change != "moved":
        twin = tile_twin(tiny_qwen3)
        twin.model.load_state_dict(other)
        for forward in ("stock", "fused"):
            assert_alike(Target(fused.model, stop_ids=(), attention="tile", forward=forward), twin, 1e-5)
    else:
        twin = Target(stock_model(tiny_qwen3).bfloat16(), stop_ids=(), attention="tile", forward="stock")
        assert_alike(Target(fused.model, stop_ids=(), attention="tile", forward="fused"), twin, 0.1)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError, ValueError, KeyError])
@pytest.mark.parametrize("where", ["fuse_model", "check_cache"])
def test_whatever_goes_wrong_the_model_stays_as_it_was(error, where, tiny_llama, monkeypatch):
    def broken(*_: object) -> None:
        raise error("in between")

    def fuse_and_break(model: nn.Module, report: ForwardReport) -> None:
        layer = model.get_decoder().layers[0]
        layer.forward = SwitchedForward(layer.forward, broken)
        broken()

    monkeypatch.setattr(f"workbench.models.adapt.{where}", fuse_and_break if where == "fuse_model" else broken)
    model = stock_model(tiny_llama)
    with pytest.raises(KeyError if error is KeyError else ValueError, match="in between"):
        Target(model, attention="tile", forward="fused")
    decoder = model.get_decoder()
    assert not hasattr(model, "workbench_forward") and "forward" not in vars(decoder.norm) | vars(decoder.rotary_emb)
    assert not any(isinstance(layer.forward, SwitchedForward) for layer in decoder.layers)
    assert_alike(Target(model, stop_ids=(), attention="tile", forward="stock"), tiny_llama, 1e-5)


def test_auto_says_why_it_did_not_fuse(tiny_llama, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise ValueError("other caches")

    monkeypatch.setattr("workbench.models.adapt.check_cache", refuse)
    monkeypatch.setattr("workbench.models.adapt.compile_model", lambda model, report: None)
    target = Target(stock_model(tiny_llama), stop_ids=(), attention="tile", forward="stock")
    quicken(target, "auto")
    assert (target.forward_report.kind, target.forward_report.reason) == ("compiled", "other caches")
    assert "cannot be fused: other caches" in caplog.text


def test_positions_up_to_the_last_one(tiny_llama):
    """Rows of a tree may stand behind the last position that a prompt may have."""
    fused, last = fresh(tiny_llama), tiny_llama.config.max_position_embeddings - 1
    outs = []
    for target in (fused, tile_twin(tiny_llama)):
        cache = target.new_cache(1, last + 64)
        cache.kv.normal_(generator=torch.Generator().manual_seed(0))
        tree = random_tree(np.random.default_rng(0), 63, target.vocab_size)
        chain = type(tree)(tree.tokens, np.arange(-1, 63, dtype=np.int32), np.arange(64, dtype=np.int32), tree.scores)
        outs.append(target.forward(Workspace(1, 64, cache.max_len, target.device).pack([chain], [0], [last]), cache))
    assert error(outs[0].logits, outs[1].logits) <= 1e-5


def test_fields_of_a_layer():
    llama, qwen = small(), small(Qwen3Config, head_dim=6, rms_norm_eps=1e-4)
    for model, head_dim, eps in ((llama, 8, 1e-6), (qwen, 6, 1e-4)):
        layer = model.get_decoder().layers[1]
        attention, mlp = layer.self_attn, layer.mlp
        found = layer_weights(layer)
        assert torch.equal(
            found.qkv, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
        assert torch.equal(found.gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        assert torch.equal(found.out, attention.o_proj.weight)
        assert torch.equal(found.down, mlp.down_proj.weight)
        assert torch.equal(found.norm1, layer.input_layernorm.weight)
        assert torch.equal(found.norm2, layer.post_attention_layernorm.weight)
        assert (found.num_heads, found.head_dim, found.eps) == (2, head_dim, eps)
        assert found.scale == pytest.approx(head_dim**-0.5)
        assert not found.qkv.requires_grad and found.qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    assert layer_weights(llama.get_decoder().layers[0]).q_norm is None
    layer = qwen.get_decoder().layers[0]
    found = layer_weights(layer)
    assert torch.equal(found.q_norm, layer.self_attn.q_norm.weight)
    assert torch.equal(found.k_norm, layer.self_attn.k_norm.weight)
    assert not torch.equal(found.q_norm, found.k_norm)


class OtherLinear(nn.Linear):
    """A linear layer that may compute anything."""


def changed(kind: str) -> nn.Module:
    """A layer of Qwen3 with one part that is not."""
    layer = small(Qwen3Config, head_dim=8).get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    if kind == "bias behind the attention":
        attention.o_proj = nn.Linear(16, 16)
    elif kind == "bias in the feed-forward":
        mlp.down_proj = nn.Linear(16, 16)
    elif kind == "other linear":
        mlp.up_proj = OtherLinear(16, 16, bias=False)
    elif kind == "eps of the second norm":
        layer.post_attention_layernorm.variance_epsilon = 1e-5
    elif kind == "eps of the keys' norm":
        attention.k_norm.variance_epsilon = 1e-5
    elif kind == "no norm of the keys":
        del attention.k_norm
    elif kind == "norm without eps":
        layer.input_layernorm = nn.Identity()
    elif kind == "another part of the attention":
        attention.gate_proj = nn.Linear(16, 16, bias=False)
    elif kind == "another norm":
        layer.post_feedforward_layernorm = copy.deepcopy(layer.input_layernorm)
    elif kind == "no feed-forward":
        del layer.mlp
    elif kind == "experts":
        del mlp.gate_proj
    return layer


def test_a_layer_that_is_not_changed_is_taken():
    assert layer_weights(changed("nothing")) is not None


@pytest.mark.parametrize(
    "kind",
    [
        "bias behind the attention",
        "bias in the feed-forward",
        "other linear",
        "eps of the second norm",
        "eps of the keys' norm",
        "no norm of the keys",
        "norm without eps",
        "another part of the attention",
        "another norm",
        "no feed-forward",
        "experts",
    ],
)
def test_foreign_layers_are_refused(kind):
    layer = changed(kind)
    weights = dict(layer.named_parameters())
    assert layer_weights(layer) is None
    assert all(weights[name] is parameter for name, parameter in layer.named_parameters())


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (Qwen2Config, {}),
        (LlamaConfig, {"attention_bias": True}),
        (LlamaConfig, {"mlp_bias": True}),
        (LlamaConfig, {"hidden_act": "gelu"}),
        (Olmo2Config, {}),
        (Phi3Config, {}),
    ],
)
def test_foreign_models_are_refused_and_left_alone(config_class, changes):
    model = small(config_class, **changes)
    target = Target(model, attention="tile", forward="stock")
    rows = pack_chunks([np.arange(9)], [0], [0], target.device)
    expected = target.forward(rows, target.new_cache(1, 9)).logits
    for _ in range(2):
        with pytest.raises(ValueError, match="other layers than Llama and Qwen3"):
            Target(model, attention="tile", forward="fused")
    assert not hasattr(model, "workbench_forward")
    assert torch.equal(target.forward(rows, target.new_cache(1, 9)).logits, expected)


def test_a_real_layer_with_four_norms_is_refused():
    assert layer_weights(Gemma2DecoderLayer(Gemma2Config(**SMALL), 0)) is None


ADDS_ONE = (GemmaConfig, {"head_dim": 8, "hidden_act": "silu"})
NO_ROTATION = (SmolLM3Config, {"no_rope_layers": [1, 1, 1, 0]})
PAIRS = {"Ernie4_5": (Ernie4_5Config, {"head_dim": 8}), "Helium": (HeliumConfig, {"head_dim": 8})}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(ADDS_ONE, torch.float32, id="norms that add one to the weight"),
        pytest.param(ADDS_ONE, torch.bfloat16, id="norms that add one to the weight, bfloat16"),
        pytest.param(NO_ROTATION, torch.float32, id="a layer without rotary positions"),
        pytest.param(NO_ROTATION, torch.bfloat16, id="a layer without rotary positions, bfloat16"),
        *(
            pytest.param(PAIRS[name], torch.bfloat16, id=f"{name}, which rotates neighbours, bfloat16")
            for name in PAIRS
        ),
    ],
)
def test_models_with_the_same_names_and_other_arithmetic_are_found_out(kind, dtype):
    """Every part bears the name of Llama's; only trying tells. The model then runs as it did."""
    config_class, changes = kind
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = small(config_class, **sizes, **changes).to(dtype)
    target = Target(model, attention="tile", forward="stock")
    rows = pack_chunks([np.arange(9)], [0], [0], target.device)
    expected = target.forward(rows, target.new_cache(1, 9), taps=(1,))
    with pytest.raises(ValueError, match=r"forward='fused': .* (gives other logits|caches other (keys|values)) fused"):
        Target(model, attention="tile", forward="fused")
    assert not hasattr(model, "workbench_forward")
    assert not any(isinstance(layer.forward, SwitchedForward) for layer in model.get_decoder().layers)
    found = target.forward(rows, target.new_cache(1, 9), taps=(1,))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.taps, expected.taps, rtol=1e-6, atol=1e-6)
    assert Target(model, attention="tile", forward="auto").forward_report is None


def cuda_pair(config_class: type, dtype: torch.dtype) -> tuple[Target, Target]:
    """Fused and stock targets of the same weights, of a size that matrix products are used to."""
    settings = dict(SMALL, vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=3)
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(config_class(**settings, head_dim=64)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.1 * noise)
    model = model.to("cuda", dtype)
    twin = copy.deepcopy(model)
    fused = Target(model, stop_ids=(), attention="tile", forward="fused")
    return fused, Target(twin, stop_ids=(), attention="tile", forward="stock")


def norm_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_replays_like_stock(config_class: type, dtype: torch.dtype, limit: float, num_rows: int) -> None:
    """A prompt of 37 tokens, then trees, also those that a captured forward finds in its place."""
    fused, stock = cuda_pair(config_class, dtype)
    rng = np.random.default_rng(num_rows)
    prompt = rng.integers(0, 512, 37)
    caches = [t.new_cache(2, 120) for t in (fused, stock)]
    for target, cache in zip((fused, stock), caches, strict=True):
        target.forward(pack_chunks([prompt], [1], [0], target.device), cache)
    assert norm_error(caches[0].kv, caches[1].kv) <= limit
    tree = random_tree(rng, num_rows - 1, 512)
    spaces = [Workspace(2, 64, cache.max_len, fused.device) for cache in caches]
    rows = [space.pack([tree], [1], [37]).on_device() for space in spaces]
    plain = [t.forward(r, c, (1, 2)) for t, r, c in zip((fused, stock), rows, caches, strict=True)]
    assert norm_error(plain[0].logits, plain[1].logits) <= limit and norm_error(plain[0].taps, plain[1].taps) <= limit
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.forward(rows[0], caches[0], (1, 2))
    for _ in range(3):
        tree = random_tree(rng, num_rows - 1, 512)
        for space in spaces:
            space.pack([tree], [1], [37])
        graph.replay()
        expected = stock.forward(rows[1], caches[1], (1, 2))
        assert norm_error(out.logits, expected.logits) <= limit and norm_error(out.taps, expected.taps) <= limit
        assert norm_error(caches[0].kv, caches[1].kv) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 60])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_fused_on_cuda_equals_stock_and_replays_over_other_tokens(config_class, dtype, limit, num_rows):
    assert_replays_like_stock(config_class, dtype, limit, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 60])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_fused_on_cuda_equals_stock_with_products_in_halves(config_class, dtype, limit, num_rows, monkeypatch):
    """As with large matrices, of which no model in the tests has any."""
    cut_rows = []

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cut_rows.append(len(x))
        return product_in_halves(x, weight)

    monkeypatch.setattr(fused_module, "CUT_WEIGHTS", 0)
    monkeypatch.setattr(fused_module, "product_in_halves", counted)
    assert_replays_like_stock(config_class, dtype, limit, num_rows)
    # Two products in each of three layers, but for the last, behind which no norm of a layer follows: of the prompt's
    # forward, of the plain one over a tree, and of the captured one.
    assert cut_rows.count(37) == 5 and cut_rows.count(num_rows) == 2 * 5
