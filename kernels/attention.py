"""Attention of a flattened token batch over a paged KV cache, in plain torch.

A plan is made once a step and serves every layer. It groups the sequences' queries into buckets of similar query and
context length, so that one batched product serves each bucket and padding at most doubles either length, short
contexts aside. Long chunks are cut into tiles, so that neither the scores nor their mask grow with the chunk times the
context.

Pages may hold anything, NaN included, beyond what their sequence has written: gathered K and V are zeroed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Queries of one tile: enough for a good matrix product, few enough to skip most of what causality hides.
_TILE = 256
# Query x key pairs of one tile or bucket (a float32 mask of it takes four times as many bytes).
_MAX_PAIRS = 1 << 22
# Cached tokens gathered at once, but at least one row's.
_MAX_GATHERED = 1 << 16
# Contexts up to this many pages share one bucket.
_SHORT_PAGES = 8
# Masks up to this many elements are kept for all layers; larger ones are made again by each.
_KEPT_MASK = 1 << 19


@dataclass(frozen=True, slots=True)
class Query:
    """Queries of one sequence.

    Args:
        row: of the page table.
        start: position of the first query; the keys 0..start are seen by it.
        length: how many.
    """

    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tiles that are computed together: B tiles of up to Q queries over up to P pages (S tokens).

    Args:
        tokens: (B, Q) where the queries are in the step's T tokens; padding repeats a tile's last query.
        positions: (B, Q) of the queries in their sequences.
        pages: (B, P).
        first_keys: (B, 1) position of the first token of the first page.
        beyond: tokens of the B * P pages (flat) that no query of the tile may read: stale content.
        valid: which of the B * Q outputs (flat) are no padding, and `targets`: the token each belongs to.
        in_order: the outputs are the step's tokens, all and in order: nothing is to be picked out or put back.
        mask: (B, 1, Q * G, S), added to the scores: 0 where a query sees a key, else -inf; None where it is too large
            to be kept.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    first_keys: Tensor
    beyond: Tensor
    valid: Tensor
    targets: Tensor
    in_order: bool
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the tokens of a step are written, and what they attend to.

    Args:
        slots: (T,) int64, page * page_size + offset of each token's K and V.
        buckets: for each window of the model's layers (None: unlimited).
    """

    slots: Tensor
    buckets: dict[int | None, tuple[Bucket, ...]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What tiles and masks depend on besides the queries."""

    window: int | None
    page_size: int
    group: int
    dtype: torch.dtype


def plan_attention(
    queries: Sequence[Query],
    page_table: Tensor,
    *,
    page_size: int,
    group: int,
    dtype: torch.dtype,
    windows: Sequence[int | None] = (None,),
) -> AttentionPlan:
    """Makes the plan of a step.

    Args:
        queries: in the order in which their tokens are flattened; T in all.
        page_table: (rows, max_pages) integers on the device that computes; entries that no query reaches may hold any
            page that exists.
        group: G, query heads for each KV head.
        dtype: of the queries.
        windows: the windows of the model's layers.
    """
    device = page_table.device
    rows = np.array([query.row for query in queries], np.int64)
    starts = np.array([query.start for query in queries], np.int64)
    lengths = np.array([query.length for query in queries], np.int64)
    firsts = np.cumsum(lengths) - lengths
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
    pages = page_table[_put(token_rows, device), _put(positions // page_size, device)].long()
    slots = pages * page_size + _put(positions % page_size, device)
    buckets: dict[int | None, tuple[Bucket, ...]] = {}
    for window in dict.fromkeys(windows):
        shape = _Shape(window, page_size, group, dtype)
        tiles = _tiles(np.stack((rows, starts, lengths, firsts)), shape)
        buckets[window] = tuple(
            _bucket(tiles[:, part], page_table, shape, len(slots)) for part in _grouped(tiles, shape)
        )
    return AttentionPlan(slots, buckets)


def paged_attention(
    q: Tensor, kv_cache: Tensor, plan: AttentionPlan, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention of every token over its own sequence. K and V of the step must have been written.

    Args:
        q: (T, heads, head_dim); heads is a multiple G of kv_heads, and query head h reads KV head h // G.
        kv_cache: (pages, page_size, 2, kv_heads, head_dim) of one layer.
        window: how many tokens back a query sees, itself included; one of those that the plan was made for.
        scale: of the scores (None: head_dim ** -0.5).

    Returns:
        (T, heads, head_dim).
    """
    shape = _Shape(window, kv_cache.shape[1], q.shape[1] // kv_cache.shape[3], q.dtype)
    buckets = plan.buckets[window]
    if len(buckets) == 1 and buckets[0].in_order:
        return _attend(q, kv_cache, buckets[0], shape, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for bucket in buckets:
        queries = q.index_select(0, bucket.tokens.flatten())
        attended = _attend(queries, kv_cache, bucket, shape, scale)
        if bucket.valid.shape[0] != attended.shape[0]:
            attended = attended.index_select(0, bucket.valid)
        out.index_copy_(0, bucket.targets, attended)
    return out


def _attend(q: Tensor, kv_cache: Tensor, bucket: Bucket, shape: _Shape, scale: float | None) -> Tensor:
    """Attention of one bucket: q and the result are (B * Q, heads, head_dim)."""
    size, length = bucket.tokens.shape
    kv_heads, head_dim = kv_cache.shape[-2:]
    kv = kv_cache.index_select(0, bucket.pages.flatten())  # (B * P, page_size, 2, kv_heads, head_dim)
    kv.flatten(0, 1).index_fill_(0, bucket.beyond, 0)
    k, v = kv.view(size, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)  # (B, kv_heads, S, head_dim) each
    # The group joins the queries, so that each KV head is read once for all its query heads.
    queries = q.view(size, length, kv_heads, shape.group, head_dim).transpose(1, 2)
    queries = queries.reshape(size, kv_heads, length * shape.group, head_dim)
    mask = bucket.mask
    if mask is None:
        mask = _mask(bucket.positions, bucket.first_keys, k.shape[2], shape)
    attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
    attended = attended.view(size, kv_heads, length, shape.group, head_dim).transpose(1, 2)
    return attended.reshape(size * length, -1, head_dim)


def _tiles(queries: Ints, shape: _Shape) -> Ints:
    """Cuts the queries, (row, start, length, first token in the step), into tiles.

    Returns the same four of each tile, the first page that it reads, and how many pages.
    """
    rows, starts, lengths, firsts = queries
    contexts = starts + lengths
    longest = np.minimum(_TILE, np.maximum(16, _MAX_PAIRS // (contexts * shape.group)))
    counts = -(-lengths // longest)
    offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * np.repeat(longest, counts)
    tile_starts = np.repeat(starts, counts) + offsets
    tile_lengths = np.minimum(np.repeat(longest, counts), np.repeat(lengths, counts) - offsets)
    first_keys = np.maximum(0, tile_starts - shape.window + 1) if shape.window else np.zeros_like(tile_starts)
    first_pages = first_keys // shape.page_size
    num_pages = -(-(tile_starts + tile_lengths) // shape.page_size) - first_pages
    tile_tokens = np.repeat(firsts, counts) + offsets
    return np.stack((np.repeat(rows, counts), tile_starts, tile_lengths, tile_tokens, first_pages, num_pages))


def _grouped(tiles: Ints, shape: _Shape) -> list[Ints]:
    """Which tiles are computed together: those whose lengths round up to the same powers of two, within the limits."""
    lengths, num_pages = tiles[2], tiles[5]
    query_class = np.ceil(np.log2(lengths)).astype(np.int64)
    page_class = np.ceil(np.log2(np.maximum(num_pages, _SHORT_PAGES))).astype(np.int64)
    _, classes = np.unique(query_class * 64 + page_class, return_inverse=True)
    groups = []
    for which in range(classes.max(initial=-1) + 1):
        members = np.flatnonzero(classes == which)
        keys = int(num_pages[members].max()) * shape.page_size
        pairs = keys * int(lengths[members].max()) * shape.group
        most = max(1, min(_MAX_GATHERED // keys, _MAX_PAIRS // pairs))
        if most < len(members):
            members = members[np.argsort(num_pages[members], kind="stable")]
        groups += [members[at : at + most] for at in range(0, len(members), most)]
    return groups


def _bucket(tiles: Ints, page_table: Tensor, shape: _Shape, num_tokens: int) -> Bucket:
    device = page_table.device
    rows, starts, lengths, tokens, first_pages, num_pages = tiles[:, :, None]  # (B, 1) each
    steps = np.arange(lengths.max())
    within = np.minimum(steps, lengths - 1)  # (B, Q)
    slots = np.minimum(first_pages + np.arange(num_pages.max()), page_table.shape[1] - 1)  # (B, P)
    num_keys = int(num_pages.max()) * shape.page_size
    first_keys = first_pages * shape.page_size
    beyond = np.flatnonzero(first_keys + np.arange(num_keys) >= starts + lengths)
    valid = np.flatnonzero(steps < lengths)
    token_at = tokens + within
    positions = _put(starts + within, device)
    first = _put(first_keys, device)
    keep = positions.numel() * shape.group * num_keys <= _KEPT_MASK
    return Bucket(
        tokens=_put(token_at, device),
        positions=positions,
        pages=page_table[_put(rows, device), _put(slots, device)].long(),
        first_keys=first,
        beyond=_put(beyond, device),
        valid=_put(valid, device),
        targets=_put(token_at.ravel()[valid], device),
        in_order=np.array_equal(token_at.ravel(), np.arange(num_tokens)),
        mask=_mask(positions, first, num_keys, shape) if keep else None,
    )


def _mask(positions: Tensor, first_keys: Tensor, num_keys: int, shape: _Shape) -> Tensor:
    """(B, 1, Q * G, S): 0 where the key is at or before the query and fewer than `window` tokens back, else -inf."""
    keys = (first_keys + torch.arange(num_keys, device=positions.device))[:, None]  # (B, 1, S)
    hidden = keys > positions[:, :, None]  # (B, Q, S)
    if shape.window is not None:
        hidden |= keys <= positions[:, :, None] - shape.window
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    return mask.repeat_interleave(shape.group, 1)[:, None]


def _put(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
