"""Between the fused projection and attention, in one pass: bias, q and k norm, rotation, K and V into their pages.

Twins: `kernels.rope` and `kernels.norm`. Computed in float32; rounded to the model's dtype where the twins round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import after_previous, early

# Heads of one program: enough bytes for wide accesses, few enough that one token keeps many programs busy.
_HEADS = 4


def rope_table(inv_freq: Tensor, length: int, scale: float) -> Tensor:
    """Cosines, then sines, of positions 0 to length - 1: (length, head_dim) float32.

    Args:
        inv_freq: (head_dim / 2,) float32, radians a token.
        scale: a factor on both (yarn's attention factor).
    """
    positions = torch.arange(length, device=inv_freq.device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq
    return torch.cat((angles.cos() * scale, angles.sin() * scale), -1)


@triton.jit
def _rope_kv(
    qkv,
    bias,
    q_norm,
    k_norm,
    table,
    positions,
    slots,
    kv_cache,
    page_stride,
    slot_stride,
    v_offset,
    head_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < H + 2 * K) & (at < D // 2)
    dtype = qkv.dtype.element_ty
    low = token * (H + 2 * K) * D + head * D + at
    x = tl.load(qkv + low, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + low + D // 2, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x = (x + tl.load(bias + head * D + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y + tl.load(bias + head * D + at + D // 2, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    is_v = head >= H + K
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        is_q = (head < H) & inside
        is_k = (head >= H) & (head < H + K) & inside
        gain = tl.load(q_norm + at + head * 0, mask=is_q, other=0.0) + tl.load(
            k_norm + at + head * 0, mask=is_k, other=0.0
        )
        high = D // 2 + at + head * 0
        gain_y = tl.load(q_norm + high, mask=is_q, other=0.0) + tl.load(k_norm + high, mask=is_k, other=0.0)
        x = tl.where(is_v, x, (x * scale * gain.to(tl.float32)).to(dtype).to(tl.float32))
        y = tl.where(is_v, y, (y * scale * gain_y.to(tl.float32)).to(dtype).to(tl.float32))
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(table + position * D + at, mask=at < D // 2, other=0.0)
    sin = tl.load(table + position * D + D // 2 + at, mask=at < D // 2, other=0.0)
    turned_x = tl.where(is_v, x, x * cos - y * sin).to(dtype)
    turned_y = tl.where(is_v, y, y * cos + x * sin).to(dtype)
    is_q = inside & (head < H)
    tl.store(qkv + low, turned_x, mask=is_q)
    tl.store(qkv + low + D // 2, turned_y, mask=is_q)
    slot = tl.load(slots + token)
    entry = kv_cache + (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
    kv_head = tl.where(is_v, head - H - K, head - H)
    target = entry + tl.where(is_v, v_offset, 0) + kv_head * head_stride + at
    is_kv = inside & (head >= H)
    tl.store(target, turned_x, mask=is_kv)
    tl.store(target + D // 2, turned_y, mask=is_kv)


def rope_kv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    *,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Turns q in place, and writes k (turned) and v into their slots.

    Args:
        qkv: (T, H + 2K, d), contiguous: the fused projection without its bias; of it q is changed.
        positions: (T,) int32, of the tokens in their sequences.
        slots: (T,) int32, page * page_size + offset of each token; all different, but for padding.
        table: from `rope_table`.
        kv_cache: (pages, page_size, 2, K, d) of one layer, any strides but the last; changed.
        bias: ((H + 2K) d,), added first.
        q_norm, k_norm: (d,) weights of the heads' norms, both or none; and their eps.
    """
    tokens, heads, size = qkv.shape
    kv_heads = kv_cache.shape[3]
    page_stride, slot_stride, v_offset, head_stride, _ = kv_cache.stride()
    _rope_kv[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        bias,
        q_norm,
        k_norm,
        table,
        positions,
        slots,
        kv_cache,
        page_stride,
        slot_stride,
        v_offset,
        head_stride,
        eps,
        H=heads - 2 * kv_heads,
        K=kv_heads,
        D=size,
        HALF=triton.next_power_of_2(size // 2),
        PAGE=kv_cache.shape[1],
        HEADS=_HEADS,
        BIAS=bias is not None,
        NORM=q_norm is not None,
        num_warps=2,
        **early(tokens, qkv.device),
    )
