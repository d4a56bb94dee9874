"""Device code that norms and rotates heads: of `kernels.rotate_write`, and of attention that does so itself.

The halves of a head are loaded apart, so that a thread holds the numbers that are rotated into each other.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(first, second, weight_1, weight_2, eps, HEAD_DIM: tl.constexpr):
    """The halves of heads [HEADS, HALF], normed, rounded, weighed and rounded again, in their dtype."""
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)[:, None]
    scale = tl.rsqrt(squares / HEAD_DIM + eps)
    # Products of two half precision numbers are exact in float32, so these are the products in the dtype.
    first = (first * scale).to(dtype).to(tl.float32) * weight_1.to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * weight_2.to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def load_halves(x_ptr, inside, HEAD_DIM: tl.constexpr):
    """Both halves of the heads at `x_ptr` [HEADS, HALF], which points at the first ones; zero where not `inside`."""
    return tl.load(x_ptr, mask=inside, other=0.0), tl.load(x_ptr + HEAD_DIM // 2, mask=inside, other=0.0)


@triton.jit
def store_halves(out_ptr, first, second, inside, HEAD_DIM: tl.constexpr):
    """Halves [HEADS, HALF] of heads to `out_ptr`, which points at the first ones."""
    tl.store(out_ptr, first, mask=inside)
    tl.store(out_ptr + HEAD_DIM // 2, second, mask=inside)


@triton.jit
def rotated(
    first,
    second,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dims,
    inside,
    eps,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """The halves of heads [HEADS, HALF], normed if asked and rotated, in their dtype.

    `dims` are the places in a half; `cos_ptr` and `sin_ptr` are those of a row, or [HEADS, 1] of many.
    """
    # Angles and weights are loaded for every head anew: from the nearest cache, in the layout of the heads.
    cos = tl.load(cos_ptr + dims, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + dims, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    if NORM:
        weight_1 = tl.load(weight_ptr + dims, mask=inside, other=0.0)
        weight_2 = tl.load(weight_ptr + HEAD_DIM // 2 + dims, mask=inside, other=0.0)
        first, second = _normed(first, second, weight_1, weight_2, eps, HEAD_DIM)
    first, second, cos, sin = first.to(tl.float32), second.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def joined(first, second):
    """Halves [N, D / 2] side by side: [N, D]."""
    num: tl.constexpr = first.shape[0]
    half: tl.constexpr = first.shape[1]
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (num, 2 * half))
