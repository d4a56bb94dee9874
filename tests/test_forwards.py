"""Compiled layers against the model's own, which target has which forward, and hidden states on their way."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafter_zoo import stock_model, tile_twin
from forward_setup import assert_alike, error, fresh, rounds, sized, small
from test_target import SMALL, random_tree
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from workbench.decode.rows import Workspace, pack_chunks
from workbench.models.compiled import compile_model, piecewise_compiler
from workbench.models.forwards import ForwardReport, SwitchedForward
from workbench.models.taps import tapped_inputs
from workbench.models.target import Target


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In place of the slow last step of the compiler: the traced operations as they are. Counts its calls."""
    calls = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: list, config_patches: dict) -> torch.fx.GraphModule:
        calls.append(sum(node.target is nn.functional.linear for node in graph.graph.nodes))
        return graph

    import torch._inductor.compile_fx as inductor

    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    return calls


def test_compiled_equals_stock(tiny_qwen3, eager_compiler):
    compiled = fresh(tiny_qwen3, "compiled")
    assert compiled.forward_report.kind == "compiled" and compiled.forward_report.merged == 3 * tiny_qwen3.num_layers
    assert_alike(compiled, tile_twin(tiny_qwen3), 1e-5)
    assert len(compiled.forward_report.seconds) == len(eager_compiler)
    # q k v, out, gate up, down: four products in every compiled layer; one in the head; none in norm and rotary.
    assert set(eager_compiler) == {4, 1, 0}
    # With masks or without them, one row or many: kinds of rows count, seven layers do not.
    assert eager_compiler.count(4) <= 4


def test_compilers_limit_holds_for_all_sizes(eager_compiler):
    """Engines of all sizes on one model: a size that is special is compiled anew, and that must have an end."""
    target = Target(small(num_hidden_layers=1), stop_ids=(), attention="tile", forward="compiled")
    rng = np.random.default_rng(0)
    for slots in (1, 4):
        cache, space = target.new_cache(slots, 60), Workspace(slots, slots * 16, 60, target.device)
        for requests in sorted({1, min(2, slots), slots}):
            chunks = [rng.integers(0, 32, n) for n in rng.integers(1, 40, requests)]
            target.forward(pack_chunks(chunks, list(range(requests)), [0] * requests, target.device), cache)
            for nodes in (0, 1, 15):
                space.pack([random_tree(rng, nodes, 32)] * requests, list(range(requests)), [40] * requests)
                rows = space.device_rows(requests, requests * (nodes + 1), 16, 60)
                assert bool(torch.isfinite(target.forward(rows, cache).logits).all())
    assert eager_compiler.count(4) <= 12


def test_the_limit_is_raised_for_us_alone(eager_compiler):
    """Other functions of the process keep the compiler's own, in every thread; ours has an end, too."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    before = torch._dynamo.config.recompile_limit
    report = ForwardReport("compiled")

    def scaled(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * len(name)

    function, x = piecewise_compiler(report)(scaled), torch.ones(3)
    for length in range(before + 4):  # every name is a kind of its own
        assert torch.equal(function(x, "a" * length), x * length)
    assert len(report.seconds) == before + 4 and torch._dynamo.config.recompile_limit == before
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function(x, "a" * (before + 4))))
    thread.start()
    thread.join()
    assert torch.equal(found[0], x * (before + 4))
    with pytest.raises(FailOnRecompileLimitHit):
        for length in range(100):
            function(x, "b" * length)
    assert torch._dynamo.config.recompile_limit == before and len(report.seconds) == 64


@pytest.mark.parametrize("change", ["copied", "moved"])
def test_a_compiled_model_is_neither_copied_nor_moved(change, tiny_llama, eager_compiler):
    """Compiled functions of a copy are those of the original, and merged products have weights of their own."""
    compiled = fresh(tiny_llama, "compiled")
    if change == "copied":
        compiled.model = copy.deepcopy(compiled.model)
    else:
        compiled.model.double()
    with pytest.raises(ValueError, match="were moved or replaced after the model was compiled"):
        rounds(compiled)
    for forward in ("compiled", "stock"):
        with pytest.raises(ValueError, match="moved after it was compiled; load another copy"):
            Target(compiled.model, attention="tile", forward=forward)


def test_stock_target_of_a_compiled_model(tiny_llama, eager_compiler):
    compiled = fresh(tiny_llama, "compiled")
    stock = Target(compiled.model, stop_ids=(), attention="plain", forward="stock")
    assert_alike(stock, tiny_llama, 1e-5)
    assert 4 not in eager_compiler


def test_compiled_for_real():
    """Through the whole compiler, which takes seconds."""
    model = small(num_hidden_layers=3)
    target = Target(copy.deepcopy(model), attention="tile", forward="stock")
    torch._dynamo.reset()
    report = ForwardReport("compiled")
    compile_model(Target(model, attention="tile", forward="stock").model, report)
    compiled = Target(model, attention="tile", forward="stock")
    compiled.forward_report = report
    rows = pack_chunks([np.arange(9), np.arange(4)], [1, 0], [0, 0], target.device)
    one, other = target.new_cache(2, 10), target.new_cache(2, 10)
    expected, found = target.forward(rows, one, taps=(2,)), compiled.forward(rows, other, taps=(2,))
    assert error(found.logits, expected.logits) <= 1e-5 and error(found.taps, expected.taps) <= 1e-5
    assert error(other.kv, one.kv) <= 1e-5
    assert report.merged == 9 and report.seconds and all(s > 0 for s in report.seconds)


def test_every_compilation_is_reported(eager_compiler):
    report = ForwardReport("compiled")
    function = piecewise_compiler(report)(lambda x: x * 2 + 1)
    for rows in (2, 5, 1, 1, 7):
        x = torch.randn(rows, 3)
        assert torch.equal(function(x), x * 2 + 1)
    assert 1 <= len(report.seconds) == len(eager_compiler) <= 2


# Which forward a target has


def test_unknown_kinds_and_fast_ones_without_the_kernels_are_refused(tiny_llama):
    model = stock_model(tiny_llama)
    with pytest.raises(ValueError, match="forward='quick' is not one of stock, compiled, fused, auto"):
        Target(model, attention="tile", forward="quick")
    for kind in ("fused", "compiled"):
        for attention in ("plain", "auto") if not torch.cuda.is_available() else ("plain",):
            with pytest.raises(ValueError, match=f"forward='{kind}' needs .* not attention='{attention}'"):
                Target(model, attention=attention, forward=kind)
    assert model.config._attn_implementation == "eager" and not hasattr(model, "workbench_forward")


@pytest.mark.parametrize(("first", "second"), [("fused", "compiled"), ("compiled", "fused")])
def test_a_model_has_one_fast_forward(first, second, tiny_llama, eager_compiler):
    target = fresh(tiny_llama, first)
    with pytest.raises(ValueError, match=f"forward='{second}': the model is {first} already"):
        Target(target.model, attention="tile", forward=second)
    again = Target(target.model, attention="tile:paper", forward=first)
    assert again.forward_report is target.forward_report
    assert target.forward_report.merged == 3 * target.num_layers  # not done twice


def test_auto_on_a_cpu_is_the_models_own(tiny_llama):
    target = Target(stock_model(tiny_llama), attention="tile")
    assert target.forward_report is None and not hasattr(target.model, "workbench_forward")


def test_switch_asks_the_call():
    switch = SwitchedForward(lambda x, packed=None: ("plain", x), lambda x, packed: ("fast", x))
    assert switch(1) == switch(1, packed=None) == switch(1, packed=SimpleNamespace(fast=False)) == ("plain", 1)
    assert switch(1, packed=SimpleNamespace(fast=True)) == ("fast", 1)


# Taps


class Doubling(nn.Module):
    """Works in place, as fused layers do."""

    def forward(self, hidden_states: torch.Tensor, packed: object = None) -> torch.Tensor:
        return hidden_states.mul_(2)


def test_taps_are_copies_of_inputs_in_any_calling_style():
    layers, call = nn.ModuleList([Doubling(), Doubling(), Doubling()]), object()
    x = torch.ones(1, 2, 3)
    with tapped_inputs(layers, (2, 0, 2), call) as states:
        layers[0](x, packed=call)
        layers[1](hidden_states=x, packed=call)
        layers[2](hidden_states=x, packed=call)
    assert sorted(states) == [0, 2]
    assert bool((states[0] == 1).all()) and bool((states[2] == 4).all()) and bool((x == 8).all())


def test_taps_ignore_foreign_calls_and_leave_no_hooks():
    layers, call = nn.ModuleList([Doubling()]), object()
    with pytest.raises(KeyError, match="in between"), tapped_inputs(layers, (0,), call) as states:
        layers[0](torch.ones(1), packed=object())
        layers[0](torch.ones(1))
        assert not states
        raise KeyError("in between")
    assert not layers[0]._forward_pre_hooks
    layers[0](torch.ones(1), packed=call)
    assert not states
    with tapped_inputs(layers, ()) as nothing:
        assert not layers[0]._forward_pre_hooks
    assert nothing == {}


def test_two_threads_do_not_mix_their_taps(tiny_llama):
    expected, found = {}, {}

    def work(seed: int, results: dict) -> None:
        rows = pack_chunks([np.random.default_rng(seed).integers(0, 97, 20)], [0], [0], tiny_llama.device)
        for _ in range(5):
            results.setdefault(seed, []).append(tiny_llama.forward(rows, tiny_llama.new_cache(1, 20), (1, 6)).taps)

    for seed in (1, 2):
        work(seed, expected)
    threads = [threading.Thread(target=work, args=(seed, found)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert all(torch.equal(a, expected[seed][0]) for a in found[seed])


@pytest.mark.gpu
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config, Qwen2Config])
def test_auto_on_cuda_fuses_or_compiles(config_class):
    settings = dict(SMALL, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    model = sized(AutoModelForCausalLM.from_config(config_class(**settings))).to("cuda")
    target = Target(model, stop_ids=())
    assert target.forward_report.kind == ("compiled" if config_class is Qwen2Config else "fused")
