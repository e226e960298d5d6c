"""Softmax over patterns of keys: by FlexAttention on GPUs, which skips masked keys, else dense."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.numbers import ceil_div
from model.ops.custom import as_autocast, disable, running_sum
from model.ops.kernels import choose_form
from model.ops.sparse_attention.patterns import (
    CAUSAL,
    Pattern,
    document_pattern_mask,
    is_by_distance,
    is_causal,
    pattern_mask,
    pattern_sees,
)

_TILE = 128  # queries and keys of a tile in FlexAttention, which calls it a block


@disable  # masks are cached; FlexAttention is compiled separately
def sparse_attention(q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where each query attends to the keys of its head's pattern.

    CUDA GPUs use FlexAttention, which skips what is masked. Otherwise attention is dense with a
    mask; on a GPU, a message says so.

    Args:
        q: (B, H, T, D).
        k: (B, G, T, D), where G divides H: H / G consecutive heads share a key and value head.
        v: (B, G, T, D).
        patterns: one for all heads, or H.

    Returns:
        y (B, H, T, D) in the type of q; 0 where a query has no key. Sums are kept in float32, or
        float64 for float64.
    """
    q, k, v = as_autocast(q, k, v)
    if q.numel() == 0:  # the kernels would divide by 0
        return q.clone()
    H = q.shape[1]
    k = repeated(k, H)
    v = repeated(v, H)
    form = _form(q)
    if len({*patterns}) == 1:
        return _attend(form, q, k, v, patterns[0])
    heads_of: dict[Pattern, list[int]] = {}
    for head, pattern in enumerate(patterns):
        heads_of.setdefault(pattern, []).append(head)
    results = []
    for pattern, heads in heads_of.items():
        results.append(_attend(form, q[:, heads], k[:, heads], v[:, heads], pattern))
    computed = [head for heads in heads_of.values() for head in heads]
    order = torch.tensor(computed, device=q.device).argsort()
    return torch.cat(results, dim=1)[:, order]


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[Pattern],
    starts: Tensor,
    scale: float | None = None,
) -> Tensor:
    """`sparse_attention` in which patterns start again with each document, and do not reach beyond
    it.

    On CUDA GPUs, 16-bit types use FlexAttention if all heads have the same pattern and it depends
    on distances alone. Everything else is dense attention with a mask: FlexAttention multiplies
    float32 as TF32, which would lose the gates of softmax attention.

    Args:
        starts: where documents begin, bool (B, T).
        scale: what scores are multiplied by; None: 1 / sqrt(D).
    """
    q, k, v = as_autocast(q, k, v)
    is_narrow = q.is_cuda and q.dtype.itemsize == 2
    is_alike = len({*patterns}) == 1 and is_by_distance(patterns[0])
    if is_narrow and is_alike and _form(q) == "flex":
        return _by_flex_attention(q, k, v, patterns[0], starts, scale)
    return dense_attention(q, k, v, document_pattern_mask(patterns, starts), scale)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """torch's attention to the keys where the mask is True, for H / G query heads a key head."""
    gqa = k.shape[1] < q.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
    )


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, starts: Tensor | None
) -> Tensor | None:
    """softmax(q k^T / sqrt(D) + a_t - a_j) v over the tokens so far; a is the running sum of log_f,
    in float32.

    Only FlexAttention computes this. The result is None where it is not used: it is used in 16-bit
    types on CUDA GPUs.

    Args:
        k, v: (B, G, T, D), where G divides H.
        log_f: (B, H, T, 1), finite.
        starts: where documents begin, bool (B, T); None: nowhere.
    """
    q, k, v = as_autocast(q, k, v)
    if not q.is_cuda or q.dtype.itemsize != 2:
        return None
    name = "softmax attention that forgets"
    if choose_form(name, "dense", "flex", q, _why_not_flex) == "dense":
        return None
    return _by_flex_attention(q, k, v, CAUSAL, starts, log_f=log_f)


def repeated(x: Tensor, H: int) -> Tensor:
    """(B, G, T, D) -> (B, H, T, D): the key or value head of each query head."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def _form(q: Tensor) -> str:
    """Choose "masks" or "flex"."""
    return choose_form("sparse attention", "masks", "flex", q, _why_not_flex)


def _why_not_flex(device: str, index: int | None, dtype: torch.dtype, head_dim: int) -> str | None:
    if head_dim < 16 or dtype == torch.float64:
        return "needs 16 features a head and a smaller type than float64"
    return None


def _attend(form: str, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    T = q.shape[2]
    if is_causal(pattern, T):
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    if form == "flex":
        return _by_flex_attention(q, k, v, pattern)
    return dense_attention(q, k, v, _dense_mask(pattern, T, q.device))


@lru_cache(maxsize=8)
def _dense_mask(pattern: Pattern, T: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, and training may use it next
        t = torch.arange(T, device=device)
        return pattern_mask([pattern], t, t)


@disable  # as above
def _by_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    starts: Tensor | None = None,
    scale: float | None = None,
    log_f: Tensor | None = None,
) -> Tensor:
    """Attend by FlexAttention's block masks."""
    attend, _ = _flex_attention()
    _, H, T, D = q.shape
    k = repeated(k, H)
    v = repeated(v, H)
    if starts is None:
        mask = _block_mask(pattern, T, q.device)
    else:
        mask = _document_block_mask(pattern, starts)
    add = None
    if log_f is not None:
        scale = D**-0.5
        q, k, add = _forgetting(q, k, log_f)
    y: Tensor = attend(q, k, v, score_mod=add, block_mask=mask, scale=scale)
    return y


def _forgetting(
    q: Tensor, k: Tensor, log_f: Tensor
) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return q and k with n more features, and the function that adds a_t - a_j to scores.

    The function gives the scores their value, and the features give a its gradient. FlexAttention's
    own gradient of a would be nondeterministic, because atomics add it up. So to the function a is
    a constant.

    A new feature adds x - x.detach() to a score: 0, with the gradient of x. x is a_m - a_j, which
    stands for a_t - a_j: what all scores of a query have in common does not change its weights. The
    text is cut into n intervals, and m is the first token of the query's. Each interval has a
    feature, which is 1 in its queries and x - x.detach() in all keys.

    With one interval, the gradient of a gate would add up the 16-bit roundings of all earlier keys.
    With n, it adds up those of one interval. FlexAttention pads features to a power of two, so n
    features take no more time than one.
    """
    T, D = q.shape[2:]
    n = 2 ** D.bit_length() - D
    dtype = torch.promote_types(q.dtype, torch.float32)
    a = running_sum(log_f.double(), 2).to(dtype)  # (B, H, T, 1)
    constant = a.detach().squeeze(-1)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (constant[b, h, i] - constant[b, h, j])

    interval = torch.arange(n, device=q.device)
    t = torch.arange(T, device=q.device).unsqueeze(1)
    is_in_interval = t * n // T == interval  # (T, n)
    new_q = is_in_interval.to(q.dtype).expand(*q.shape[:3], -1)
    a_of_interval = a[:, :, interval * T // n].mT  # (B, H, 1, n)
    x = (a_of_interval - a) * D**0.5  # (B, H, T, n); scores are divided by D^0.5
    new_k = (x - x.detach()).to(k.dtype)
    return torch.cat([q, new_q], -1), torch.cat([k, new_k], -1), add


@lru_cache(maxsize=1)
def _flex_attention() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention  # slow to import

    # Each pattern is compiled with and without gradients, and again for other shapes. Beyond the
    # limit flex_attention would run uncompiled, with T x T scores: fullgraph makes that an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, fullgraph=True), BlockMask


@lru_cache(maxsize=64)
def _block_mask(pattern: Pattern, T: int, device: torch.device) -> Any:
    def sees(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        return pattern_sees(pattern, i, j)

    with torch.inference_mode(False):  # cached, and training may use it next
        some, every = _visible_tiles(pattern, T, device)
        return _mask_of(some, every, sees, T)


def _document_block_mask(pattern: Pattern, starts: Tensor) -> Any:
    """Return the mask of a pattern by distance, in each document.

    Numbers of documents ascend in a row of tokens.
    """
    T = starts.shape[1]
    device = starts.device
    number = starts.cumsum(1, dtype=torch.int32)  # (B, T)

    def sees(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        return pattern_sees(pattern, i, j) & (number[b, i] == number[b, j])

    some, every = _visible_tiles(pattern, T, device)  # (n, n)
    # A tile has pairs of one document if the keys' last document is not before the queries' first:
    # no key comes after its query. With gaps between keys, none of these pairs may be visible,
    # which costs only time.
    t = torch.arange(0, T, _TILE, device=device)  # (n,)
    first = number[:, t]  # (B, n)
    last = number[:, (t + _TILE - 1).clamp(max=T - 1)]  # (B, n)
    meets = last.unsqueeze(1) >= first.unsqueeze(2)  # (B, n, n)
    is_within = first.unsqueeze(1) == last.unsqueeze(2)  # from the first key to the last query
    return _mask_of(some & meets, every & is_within, sees, T)


@lru_cache(maxsize=64)
def _visible_tiles(pattern: Pattern, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tiles of 128 x 128 where some or all pairs are seen, (n, n), bool.

    Computed row by row, because torch's own function needs T x T memory.
    """
    n = ceil_div(T, _TILE)
    some = []
    every = []
    with torch.inference_mode(False):
        j = torch.arange(n * _TILE, device=device)
        for row in j.split(_TILE):
            i = row.unsqueeze(1)
            sees = pattern_sees(pattern, i, j) & (i < T) & (j < T)  # (128, n 128)
            tiles = sees.unflatten(1, (n, _TILE))
            some.append(tiles.any(2).any(0))
            every.append(tiles.all(2).all(0))
        return torch.stack(some), torch.stack(every)


def _mask_of(some: Tensor, every: Tensor, sees: Callable[..., Tensor], T: int) -> Any:
    """Return FlexAttention's mask of T x T, given tiles (B, n, n) or (n, n) where it sees some or
    all pairs."""
    _, BlockMask = _flex_attention()
    partial_tiles = _numbered(some & ~every)
    full_tiles = _numbered(every)
    return BlockMask.from_kv_blocks(
        *partial_tiles, *full_tiles, BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(T, T)
    )


def _numbered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles of each row are set (B, 1, n), and its columns with these first, (B, 1,
    n, n)."""
    tiles = tiles.view(-1, 1, *tiles.shape[-2:])
    columns = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), columns.to(torch.int32)
