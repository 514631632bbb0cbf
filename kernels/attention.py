"""Attention of a flattened token batch over a paged KV cache, in plain torch.

A plan is made once a step and serves every layer. It groups the sequences' queries into buckets of similar query and
context length, so that one batched product serves each bucket and padding at most doubles either length. Long chunks
are cut into tiles, so that neither the scores nor their mask grow with the chunk times the context.

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
    """Tiles that are computed together: B tiles of up to Q queries over up to P pages.

    Args:
        tokens: (B, Q) where the queries are in the step's T tokens; padding repeats a tile's last query.
        positions: (B, Q) of the queries in their sequences.
        pages: (B, P).
        first_keys: (B, 1) position of the first token of the first page.
        beyond: tokens of the B * P pages (flat) that no query of the tile may read: stale content.
        valid: which of the B * Q outputs (flat) are no padding, and `targets`: the token each belongs to.
        mask: (B, 1, Q * G, S) bool, True where a query sees a key; None where it is too large to be kept.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    first_keys: Tensor
    beyond: Tensor
    valid: Tensor
    targets: Tensor
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


def plan_attention(
    queries: Sequence[Query],
    page_table: Tensor,
    *,
    page_size: int,
    group: int,
    windows: Sequence[int | None] = (None,),
) -> AttentionPlan:
    """Makes the plan of a step.

    Args:
        queries: in the order in which their tokens are flattened; T in all.
        page_table: (rows, max_pages) integers on the device that computes; entries that no query reaches may hold any
            page that exists.
        group: G, query heads for each KV head.
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
        tiles = _tiles(np.stack((rows, starts, lengths, firsts)), window, page_size, group)
        buckets[window] = tuple(
            _bucket(tiles[:, members], page_table, window, page_size, group)
            for members in _grouped(tiles, group, page_size)
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
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kv_heads, head_dim = kv_cache.shape[-2:]
    group = q.shape[1] // kv_heads
    for bucket in plan.buckets[window]:
        size, length = bucket.tokens.shape
        kv = kv_cache.index_select(0, bucket.pages.flatten())  # (B * P, page_size, 2, kv_heads, head_dim)
        kv.flatten(0, 1).index_fill_(0, bucket.beyond, 0)
        k, v = kv.view(size, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)  # (B, kv_heads, S, head_dim) each
        queries = q.index_select(0, bucket.tokens.flatten()).view(size, length, kv_heads, group, head_dim)
        # The group joins the queries, so that each KV head is read once for all its query heads.
        queries = queries.transpose(1, 2).reshape(size, kv_heads, length * group, head_dim)
        mask = bucket.mask
        if mask is None:
            mask = _mask(bucket.positions, bucket.first_keys, k.shape[2], window, group)
        attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
        attended = attended.view(size, kv_heads, length, group, head_dim).transpose(1, 2)
        attended = attended.reshape(size * length, *q.shape[1:])
        if bucket.valid.shape[0] != size * length:
            attended = attended.index_select(0, bucket.valid)
        out.index_copy_(0, bucket.targets, attended)
    return out


def _tiles(queries: Ints, window: int | None, page_size: int, group: int) -> Ints:
    """Cuts the queries, (row, start, length, first token in the step), into tiles.

    Returns the same four of each tile, the first page that it reads, and how many pages.
    """
    rows, starts, lengths, firsts = queries
    contexts = starts + lengths
    longest = np.minimum(_TILE, np.maximum(16, _MAX_PAIRS // (contexts * group)))
    counts = -(-lengths // longest)
    offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * np.repeat(longest, counts)
    tile_starts = np.repeat(starts, counts) + offsets
    tile_lengths = np.minimum(np.repeat(longest, counts), np.repeat(lengths, counts) - offsets)
    first_keys = np.zeros_like(tile_starts) if window is None else np.maximum(0, tile_starts - window + 1)
    first_pages = first_keys // page_size
    num_pages = -(-(tile_starts + tile_lengths) // page_size) - first_pages
    tile_tokens = np.repeat(firsts, counts) + offsets
    return np.stack((np.repeat(rows, counts), tile_starts, tile_lengths, tile_tokens, first_pages, num_pages))


def _grouped(tiles: Ints, group: int, page_size: int) -> list[Ints]:
    """Which tiles are computed together: those whose lengths round up to the same powers of two, within the limits."""
    lengths, num_pages = tiles[2], tiles[5]
    query_class = np.ceil(np.log2(lengths)).astype(np.int64)
    page_class = np.ceil(np.log2(np.maximum(num_pages, _SHORT_PAGES))).astype(np.int64)
    _, classes = np.unique(query_class * 64 + page_class, return_inverse=True)
    groups = []
    for which in range(classes.max(initial=-1) + 1):
        members = np.flatnonzero(classes == which)
        members = members[np.argsort(num_pages[members], kind="stable")]
        keys = int(num_pages[members].max()) * page_size
        pairs = keys * int(lengths[members].max()) * group
        most = max(1, min(_MAX_GATHERED // keys, _MAX_PAIRS // pairs))
        groups += [members[at : at + most] for at in range(0, len(members), most)]
    return groups


def _bucket(tiles: Ints, page_table: Tensor, window: int | None, page_size: int, group: int) -> Bucket:
    device = page_table.device
    rows, starts, lengths, tokens, first_pages, num_pages = tiles[:, :, None]  # (B, 1) each
    steps = np.arange(lengths.max())
    within = np.minimum(steps, lengths - 1)  # (B, Q)
    slots = np.minimum(first_pages + np.arange(num_pages.max()), page_table.shape[1] - 1)  # (B, P)
    num_keys = int(num_pages.max()) * page_size
    first_keys = first_pages * page_size
    beyond = np.flatnonzero(first_keys + np.arange(num_keys) >= starts + lengths)
    valid = np.flatnonzero(steps < lengths)
    token_at = tokens + within
    positions = _put(starts + within, device)
    first = _put(first_keys, device)
    keep = positions.numel() * group * num_keys <= _KEPT_MASK
    return Bucket(
        tokens=_put(token_at, device),
        positions=positions,
        pages=page_table[_put(rows, device), _put(slots, device)].long(),
        first_keys=first,
        beyond=_put(beyond, device),
        valid=_put(valid, device),
        targets=_put(token_at.ravel()[valid], device),
        mask=_mask(positions, first, num_keys, window, group) if keep else None,
    )


def _mask(positions: Tensor, first_keys: Tensor, num_keys: int, window: int | None, group: int) -> Tensor:
    """(B, 1, Q * G, S) bool: key at or before the query, and fewer than `window` tokens back."""
    keys = (first_keys + torch.arange(num_keys, device=positions.device))[:, None]  # (B, 1, S)
    seen = keys <= positions[:, :, None]  # (B, Q, S)
    if window is not None:
        seen &= keys > positions[:, :, None] - window
    return seen.repeat_interleave(group, 1)[:, None]


def _put(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
