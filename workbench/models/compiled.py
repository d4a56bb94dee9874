"""Compiling a stock model layer by layer, so that one compilation serves all layers, batches and cache sizes.

What a decoder layer leaves unfused (norms, rotary positions, activation, residuals) the compiler fuses around the
attention operator. A whole model in one piece would be compiled anew for minutes whenever a size is special; one layer
takes seconds, and all layers have the same code.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import nn

from workbench.models.forwards import ForwardReport, SwitchedForward, WeightPlaces
from workbench.models.merge import merge_equal_products, merge_layer

#: Compilations of one function, in place of the compiler's eight: one row or several, one request or several, masks or
#: none, a cache of one slot or several, and what else of size one it takes for special.
_MOST_COMPILATIONS = 64


def compile_model(model: nn.Module, report: ForwardReport) -> None:
    """Gives the decoder layers of an adapted model a compiled forward, and what is around them too, in place.

    The compiled layer runs where the argument `packed` asks for it, so other attentions still find the model's own.
    Query, key and value products and gate and up products become one each (`workbench.models.merge`), so weights may
    be changed in place afterwards, but neither moved nor copied together with the model.

    Args:
        model: adapted for packed rows.
        report: what later compilations add to; gets the places of the weights.
    """
    compiler = piecewise_compiler(report)
    decoder = model.get_decoder()
    for layer in decoder.layers:
        report.merged += merge_layer(layer)
        layer.forward = SwitchedForward(layer.forward, compiler(layer.forward))
    # Functions of their inputs alone.
    for module in (decoder.rotary_emb, decoder.norm, model.get_output_embeddings()):
        module.forward = compiler(module.forward)
    report.places = WeightPlaces([*decoder.layers, decoder.norm])


def piecewise_compiler(report: ForwardReport) -> Callable[[Callable], Callable]:
    """A decorator that compiles for any number of rows, up to 64 times where sizes of one make a difference.

    Args:
        report: gets the seconds of every compilation.
    """

    from torch._dynamo.exc import FailOnRecompileLimitHit  # slow to import, too

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # slow to import, and of no use on a CPU

        began = time.perf_counter()
        merge_equal_products(graph)
        compiled = compile_fx(graph, inputs, config_patches=_settings(inputs))
        report.seconds.append(time.perf_counter() - began)
        return compiled

    def decorate(function: Callable) -> Callable:
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            try:
                return compiled(*args, **kwargs)
            except FailOnRecompileLimitHit:
                # Raised before anything ran. The limit is raised here and not for good, since it is everyone's, and
                # later versions of torch keep it by thread; and not for every call, since that takes 16 us.
                with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS):
                    return compiled(*args, **kwargs)

        return call

    return decorate


def _settings(inputs: list) -> dict[str, object]:
    """Settings of the compiler: a single row is a product of a matrix and a vector, which it makes itself."""
    states = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() <= 3]
    many_rows = any(isinstance(size, torch.SymInt) for x in states for size in x.shape)
    return {} if many_rows else {"coordinate_descent_tuning": True}
