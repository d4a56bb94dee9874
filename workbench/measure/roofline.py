"""What a device can do at best, and how long a target forward must take for that.

Ceilings are measured on the device with large operations. Floors are counted from sizes: bytes that must be read over
the bandwidth of a large copy, arithmetic over the rate of large matrix products. What lies between a measured time and
its floor is what kernels, launches and small shapes cost.

Weights are counted in two ways, which differ for a target whose head is not its embedding: `WeightBytes.read` is what
a forward must read (all layers and the head; of the embedding only the rows of its tokens, which are left out);
`WeightBytes.whole` is the size of the checkpoint, embedding included. Norms, less than a thousandth, are in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from workbench.measure.kernel_times import copy_bandwidth, time_calls
from workbench.models.cache import head_dim_of

#: Bytes that are read, and side of the square matrices of the product.
_LARGE = {"cuda": (1 << 30, 8192), "cpu": (1 << 26, 1024)}
#: Which bandwidth floors are stated by, as records say it: that of a copy.
FLOOR_BANDWIDTH = "copy"


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches with large operations; medians.

    Attributes:
        copy_bytes_per_s: of a copy by an elementwise kernel, bytes read and bytes written both counted, see
            `copy_bandwidth`; floors are stated by it.
        read_bytes_per_s: of reading only, the better of a sum and a product of a matrix and a vector.
        matmul_flops_per_s: of a product of square matrices, two operations a multiplication.
        dtype: of the product.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: float
    dtype: str

    @property
    def floor_bytes_per_s(self) -> float:
        """The bandwidth `FLOOR_BANDWIDTH`."""
        return self.copy_bytes_per_s


def measure_ceilings(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, repeats: int = 15, seed: int = 0
) -> Ceilings:
    """Measures the ceilings of a device; on a GPU it needs 2 GB for a moment and takes a second.

    Args:
        device: a CUDA device or the CPU.
        dtype: of the matrix product.
        repeats: passes, of which the median counts.
        seed: of the data.

    Raises:
        ValueError: another kind of device.
    """
    device = torch.device(device)
    if device.type not in _LARGE:
        raise ValueError(f"device={str(device)!r}; allowed: {', '.join(_LARGE)}")
    size, side = _LARGE[device.type]
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        copied = copy_bandwidth(device, repeats)
        read_s = _read_seconds(torch.randn(size // (4 * side), side, device=device, generator=generator), repeats)
        left, right = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
        product_s = _seconds(lambda: left @ right, device, repeats)
    return Ceilings(copied, size / read_s, 2 * side**3 / product_s, str(dtype).removeprefix("torch."))


def _read_seconds(matrix: torch.Tensor, repeats: int) -> float:
    """The faster one of two operations that read a matrix and write next to nothing."""
    vector = torch.ones_like(matrix[0])
    return min(_seconds(call, matrix.device, repeats) for call in (matrix.sum, lambda: torch.mv(matrix, vector)))


def _seconds(call: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> float:
    return time_calls([call], device, repeats).median_us * 1e-6


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the matrices of a target.

    Attributes:
        layers: all decoder layers.
        head: the output head.
        embedding: the input embedding; 0 when it is the head.
    """

    layers: int
    head: int
    embedding: int

    @property
    def read(self) -> int:
        """What one forward must read, however few its rows."""
        return self.layers + self.head

    @property
    def whole(self) -> int:
        """What the checkpoint has."""
        return self.layers + self.head + self.embedding


def weight_bytes(config: PreTrainedConfig, itemsize: int = 2) -> WeightBytes:
    """Bytes of the matrices of a Llama- or Qwen3-style target.

    Args:
        config: of the target.
        itemsize: bytes of a number.
    """
    head = config.vocab_size * config.hidden_size * itemsize
    layers = config.num_hidden_layers * _layer_weights(config) * itemsize
    return WeightBytes(layers, head, 0 if config.tie_word_embeddings else head)


def kv_bytes(config: PreTrainedConfig, tokens: int, itemsize: int = 2) -> int:
    """Bytes of the keys and values of `tokens` tokens in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config) * itemsize * tokens


def product_flops(config: PreTrainedConfig, rows: int, logit_rows: int | None = None) -> int:
    """Operations of the matrix products of one forward.

    Args:
        config: of the target.
        rows: rows of the forward.
        logit_rows: rows whose logits are wanted; None for all.
    """
    head = config.vocab_size * config.hidden_size * (rows if logit_rows is None else logit_rows)
    return 2 * (config.num_hidden_layers * _layer_weights(config) * rows + head)


def attention_flops(config: PreTrainedConfig, pairs: int) -> int:
    """Operations of attention in all layers for `pairs` pairs of a row and a token that it attends."""
    return 4 * config.num_hidden_layers * config.num_attention_heads * head_dim_of(config) * pairs


def forward_floor(
    config: PreTrainedConfig,
    rows: int,
    context: int | Sequence[int],
    requests: int,
    ceilings: Ceilings,
    itemsize: int = 2,
) -> dict[str, float]:
    """Seconds that one target forward over packed rows must take, by term.

    Args:
        config: of the target.
        rows: of all requests together, spread evenly and causal among themselves.
        context: committed tokens of every request, or of each.
        requests: that share the rows.
        ceilings: of the device.
        itemsize: bytes of a number, in weights and in the cache.

    Returns:
        `weights_s` for reading weights, `products_s` for the arithmetic on them, `kv_s` for reading keys and values
        (those of the rows too), `attention_s` for the arithmetic on those, and `floor_s`, the longer one of either
        pair added up: products and attention wait for one another.

    Raises:
        ValueError: rows, requests or contexts out of range.
    """
    contexts = [context] * requests if isinstance(context, int) else list(context)
    if requests < 1 or rows < requests or len(contexts) != requests or min(contexts) < 0:
        raise ValueError(
            f"rows={rows}, requests={requests}, context={context}; allowed: at least one request, a row for each, "
            "and one context of 0 or more tokens for each"
        )
    pairs = round(sum(c + (rows / requests + 1) / 2 for c in contexts) * rows / requests)
    terms = {
        "weights_s": weight_bytes(config, itemsize).read / ceilings.floor_bytes_per_s,
        "products_s": product_flops(config, rows) / ceilings.matmul_flops_per_s,
        "kv_s": kv_bytes(config, sum(contexts) + rows, itemsize) / ceilings.floor_bytes_per_s,
        "attention_s": attention_flops(config, pairs) / ceilings.matmul_flops_per_s,
    }
    floor = max(terms["weights_s"], terms["products_s"]) + max(terms["kv_s"], terms["attention_s"])
    return terms | {"floor_s": floor}


def _layer_weights(config: PreTrainedConfig) -> int:
    """Numbers in the matrices of one decoder layer."""
    head_dim = head_dim_of(config)
    width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
