"""Sparse attention in time proportional to its keys: dense attention on the tiles of every part, joined in one softmax.

The tiles of part p give their result y_p and the logarithm l_p of their softmax's sum. Parts are disjoint, so together

    l = log sum_p exp(l_p),    y = sum_p exp(l_p - l) y_p

A tile's weights in the whole are exp(scores - l), so its backward pass is that of FlashAttention (Dao et al. 2022,
arXiv 2205.14135, algorithm 4) with y and l in place of y_p and l_p. It needs only y, l, and each part's q, k and v.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.ops.custom import (
    as_autocast,
    disable,
    refuse_second_order,
    refuse_transforms,
    running_sum,
)
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
from model.ops.sparse_attention.tiles import UNSEEN, Tiles, tile_mask, tiles_of

_ITSELF, _OTHER = "sparse_attention in tiles", "naive_sparse_attention"
_aten = torch.ops.aten
_BLOCK = 128  # queries and keys of a block in FlexAttention
_SHORT = 128  # tokens: for shorter sequences, preparing tiles takes longer than it saves


@disable  # layouts and masks are cached; FlexAttention is compiled separately
def sparse_attention(q: Tensor, k: Tensor, v: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where each query attends to the keys of its head's pattern.

    CPUs use tiles if they are faster than dense attention, and CUDA GPUs FlexAttention: both
    skip masked blocks. Otherwise attention is dense with a mask; on a GPU, a message says so.

    Args:
        q: (B, H, T, D).
        k: (B, G, T, D), where G divides H: H / G consecutive heads share a key and value head.
        v: (B, G, T, D).
        patterns: one for all heads, or H.

    Returns:
        y (B, H, T, D) in the type of q; 0 where a query has no key. Sums are kept in float32, or float64 for float64.

    Raises:
        ValueError: shapes do not match.
    """
    H, G = q.shape[1], k.shape[1]
    if (
        k.shape != v.shape
        or H % G
        or k.shape != (q.shape[0], G, *q.shape[2:])
        or len(patterns) not in (1, H)
    ):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(
            f"{shapes} and {len(patterns)} patterns: need (B, H, T, D), (B, G, T, D) twice, and 1 or H"
        )
    q, k, v = as_autocast(q, k, v)
    if q.numel() == 0:  # the kernels would divide by 0
        return q.clone()
    k, v = _repeated(k, H), _repeated(v, H)
    form = _form(q)
    kinds = list(dict.fromkeys(patterns))
    if len(kinds) == 1:
        return _attend(form, q, k, v, kinds[0])
    heads = [[h for h, pattern in enumerate(patterns) if pattern == kind] for kind in kinds]
    results = [
        _attend(form, q[:, hs], k[:, hs], v[:, hs], kind)
        for hs, kind in zip(heads, kinds, strict=True)
    ]
    order = torch.tensor([h for hs in heads for h in hs], device=q.device).argsort()
    return torch.cat(results, dim=1)[:, order]


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[Pattern],
    starts: Tensor,
    scale: float | None = None,
) -> Tensor:
    """`sparse_attention` in which patterns start again with each document, and do not reach beyond it.

    On CUDA GPUs, 16-bit types use FlexAttention if all heads have the same pattern and it
    depends on distances alone. Everything else is dense attention with a mask: FlexAttention multiplies float32 as
    TF32, which would lose the gates of softmax attention.

    Args:
        starts: where documents begin, bool (B, T).
        scale: what scores are multiplied by; None: 1 / sqrt(D).
    """
    q, k, v = as_autocast(q, k, v)
    alike = len({*patterns}) == 1 and is_by_distance(patterns[0])
    if alike and q.is_cuda and q.dtype.itemsize == 2 and _form(q) == "flex":
        return _by_flex_attention(q, k, v, patterns[0], starts, scale)
    mask = document_pattern_mask(patterns, starts)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
    )


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, starts: Tensor | None
) -> Tensor | None:
    """softmax(q k^T / sqrt(D) + a_t - a_j) v over the tokens so far; a is the running sum of log_f, in float32.

    Only by FlexAttention: None where it is not used, which is anywhere but on CUDA GPUs, in 16-bit types.

    Args:
        k, v: (B, G, T, D), where G divides H.
        log_f: (B, H, T, 1), finite.
        starts: where documents begin, bool (B, T); None: nowhere.
    """
    q, k, v = as_autocast(q, k, v)
    if not q.is_cuda or q.dtype.itemsize != 2:
        return None
    if (
        choose_form(
            "softmax attention that forgets", "auto", ("dense", "flex"), q, why_not=_why_not_flex
        )
        == "dense"
    ):
        return None
    return _by_flex_attention(q, k, v, CAUSAL, starts, log_f=log_f)


def _repeated(x: Tensor, H: int) -> Tensor:
    """(B, G, T, D) -> (B, H, T, D): the key or value head of each query head."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def _form(q: Tensor) -> str:
    """Choose "tiles", "flex" or "masks"."""
    if q.device.type == "cpu":
        return "tiles"
    return choose_form("sparse attention", "auto", ("masks", "flex"), q, why_not=_why_not_flex)


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
    if form == "masks" or not _tiles_pay(pattern, T):
        return scaled_dot_product_attention(q, k, v, attn_mask=_dense_mask(pattern, T, q.device))
    return _in_tiles(q, k, v, pattern)


def _tiles_pay(pattern: Pattern, T: int) -> bool:
    """Whether tiles are faster than dense attention with a mask, as measured forward and backward on a CPU."""
    return T >= _SHORT and sum(tiles.n_scores(T) for tiles in tiles_of(pattern, T)) < 0.4 * T**2


@lru_cache(maxsize=8)
def _dense_mask(pattern: Pattern, T: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, and training may use it next
        t = torch.arange(T, device=device)
        return pattern_mask([pattern], t, t)


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    refuse_transforms(_ITSELF, _OTHER, q, k, v)
    laid_out = []
    layouts = tiles_of(pattern, q.shape[2])
    if not layouts:
        return q * 0  # no query has a key
    for tiles in layouts:  # outside of the operator, so that autograd differentiates the layout
        laid_out += [tiles.queries(q[:, :, tiles.rows(q.shape[2])]), tiles.keys(k), tiles.keys(v)]
    y: Tensor = _Joined.apply(layouts, q.shape, *laid_out)
    return y


class _Joined(torch.autograd.Function):
    """One softmax over the tiles of all parts, by the CPU kernels of `scaled_dot_product_attention`."""

    @staticmethod
    def forward(
        ctx: Any, layouts: tuple[Tiles, ...], shape: torch.Size, *laid_out: Tensor
    ) -> Tensor:
        B, H, T, _ = shape
        q = laid_out[0]
        y, lse = None, None
        for n, tiles in enumerate(layouts):
            y_p, lse_p = _aten._scaled_dot_product_flash_attention_for_cpu(
                *laid_out[3 * n : 3 * n + 3],
                0.0,
                tiles.causal,
                attn_mask=tile_mask(tiles, T, q.dtype),
            )
            rows = tiles.rows(T)
            n_rows = rows.stop - rows.start
            y_p, lse_p = (tiles.natural(x, B, n_rows) for x in (y_p, lse_p.unsqueeze(-1)))
            if len(layouts) == 1:
                y, lse = y_p, lse_p
                break
            if y is None or lse is None:
                y, lse = lse_p.new_zeros(shape), lse_p.new_full((B, H, T, 1), 2 * UNSEEN)
            before, total = lse[:, :, rows], torch.logaddexp(lse[:, :, rows], lse_p)
            y[:, :, rows] = y[:, :, rows] * (before - total).exp() + y_p * (lse_p - total).exp()
            lse[:, :, rows] = total
        assert y is not None
        assert lse is not None
        nothing = lse < UNSEEN / 2  # queries without keys
        y, lse = y.masked_fill(nothing, 0).to(q.dtype), lse.masked_fill(nothing, 0)
        ctx.layouts = layouts
        ctx.save_for_backward(y, lse, *laid_out)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order(_ITSELF, _OTHER)
        y, lse, *laid_out = ctx.saved_tensors
        T = y.shape[2]
        gradients: list[Tensor | None] = [None, None]
        for n, tiles in enumerate(ctx.layouts):
            rows = tiles.rows(T)
            g_p, y_p, lse_p = (tiles.queries(x[:, :, rows]) for x in (g, y, lse))
            gradients += _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g_p,
                *laid_out[3 * n : 3 * n + 3],
                y_p,
                lse_p.squeeze(-1),
                0.0,
                tiles.causal,
                attn_mask=tile_mask(tiles, T, y.dtype),
            )
        return tuple(gradients)


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
    (H, T), device = q.shape[1:3], q.device
    k, v = _repeated(k, H), _repeated(v, H)
    mask = (
        _block_mask(pattern, T, device) if starts is None else _document_block_mask(pattern, starts)
    )
    add = None
    if log_f is not None:
        scale = q.shape[-1] ** -0.5
        q, k, add = _forgetting(q, k, log_f)
    y: Tensor = attend(q, k, v, score_mod=add, block_mask=mask, scale=scale)
    return y


def _forgetting(
    q: Tensor, k: Tensor, log_f: Tensor
) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return q and k with n more features, and the function that adds a_t - a_j to scores.

    To it, a is a constant: FlexAttention would add up gradients of a by atomics, in any order. They are in the gradient
    of the new features of k, which are 0. Feature m of a key is a_m - a_j less itself, and only the queries of stretch
    m of the text read it: a_m may be any token's, since a constant in all scores of a query changes nothing. With one
    feature for all queries, the gradient of a gate would have the roundings to 16 bits of all keys before it, and not
    of a stretch. FlexAttention computes with a power of two of features, so more than one take no more time.
    """
    T, D = q.shape[2:]
    n = 2 ** D.bit_length() - D
    a = running_sum(log_f.double(), 2).to(
        torch.promote_types(q.dtype, torch.float32)
    )  # (B, H, T, 1)
    fixed = a.detach().squeeze(-1)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (fixed[b, h, i] - fixed[b, h, j])

    stretch = torch.arange(n, device=q.device)
    own = torch.arange(T, device=q.device).unsqueeze(1) * n // T == stretch  # (T, n)
    since = (a[:, :, stretch * T // n].mT - a) * D**0.5  # (B, H, T, n)
    q = torch.cat([q, own.to(q.dtype).expand(*q.shape[:3], -1)], -1)
    return q, torch.cat([k, (since - since.detach()).to(k.dtype)], -1), add


@lru_cache(maxsize=1)
def _flex_attention() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention  # slow to import

    # Each pattern is compiled with and without gradients, and again for other shapes. Beyond the limit flex_attention
    # would run uncompiled, with T x T scores: fullgraph makes that an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, fullgraph=True), BlockMask


@lru_cache(maxsize=64)
def _block_mask(pattern: Pattern, T: int, device: torch.device) -> Any:
    def sees(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        return pattern_sees(pattern, i, j)

    with torch.inference_mode(False):  # cached, and training may use it next
        return _of_blocks(*_blocks(pattern, T, device), sees, T)


def _document_block_mask(pattern: Pattern, starts: Tensor) -> Any:
    """The mask of a pattern that is by distance, in each document: numbers of documents ascend in a row of tokens."""
    T, device = starts.shape[1], starts.device
    number = starts.cumsum(1, dtype=torch.int32)  # (B, T)

    def sees(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        return pattern_sees(pattern, i, j) & (number[b, i] == number[b, j])

    some, every = _blocks(pattern, T, device)  # (n, n)
    # With gaps between keys, `some & meet` may be more than the blocks with a visible pair, which costs only time.
    t = torch.arange(0, T, _BLOCK, device=device)  # (n,)
    first, last = number[:, t], number[:, (t + _BLOCK - 1).clamp(max=T - 1)]  # (B, n)
    meet = last.unsqueeze(1) >= first.unsqueeze(2)  # (B, n, n), as no key comes after its query
    one = first.unsqueeze(1) == last.unsqueeze(2)  # from the first key to the last query
    return _of_blocks(some & meet, every & one, sees, T)


@lru_cache(maxsize=64)
def _blocks(pattern: Pattern, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks of 128 x 128 where some or all pairs are seen, (n, n), bool.

    Computed row by row, because torch's own function needs T x T memory.
    """
    n = -(-T // _BLOCK)
    with torch.inference_mode(False):
        t = torch.arange(n * _BLOCK, device=device)
        some, every = (torch.zeros(n, n, dtype=torch.bool, device=device) for _ in range(2))
        for row, i in enumerate(t.split(_BLOCK)):
            seen = (
                pattern_sees(pattern, i.unsqueeze(1), t) & (i.unsqueeze(1) < T) & (t < T)
            )  # (128, n 128)
            blocks = seen.unflatten(1, (n, _BLOCK))
            some[row], every[row] = blocks.any(2).any(0), blocks.all(2).all(0)
        return some, every


def _of_blocks(some: Tensor, every: Tensor, sees: Callable[..., Tensor], T: int) -> Any:
    """Return FlexAttention's mask of T x T, given blocks (B, n, n) or (n, n) where it sees some or all pairs."""
    partly, wholly = (_numbered(blocks) for blocks in (some & ~every, every))
    _, BlockMask = _flex_attention()
    return BlockMask.from_kv_blocks(
        *partly, *wholly, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(T, T)
    )


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row (B, 1, n), and its columns with these blocks first, (B, 1, n, n)."""
    blocks = blocks.view(-1, 1, *blocks.shape[-2:])
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.to(torch.int32)
