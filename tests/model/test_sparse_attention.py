"""Sparse attention: the operator against loops over the definitions, the modules against theirs, streaming, bounds."""

import functools
from types import SimpleNamespace

import agreement
import pytest
import torch
from gradients import assert_all_close
from made_on import suspended

from common.console import say_once
from common.settings import decode
from model.attention.longformer import LongformerConfig
from model.attention.sparse import SlidingWindowConfig, StridedConfig
from model.config import GPTConfig
from model.gpt import GPT
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.masked_attention import naive_sparse_attention
from model.ops.sparse_attention.patterns import CAUSAL, fixed, is_causal, longformer, pattern_mask, strided, window

# The definitions, one query and one key at a time.
PATTERNS = {
    "window 5": ([window(5)], lambda h, i, j: 0 <= i - j < 5),
    "window 1": ([window(1)], lambda h, i, j: i == j),
    "window beyond T": ([window(1000)], lambda h, i, j: j <= i),
    "dilated": ([window(4, 2)], lambda h, i, j: 0 <= i - j < 12 and (i - j) % 3 == 0),
    "wide blocks": ([window(290)], lambda h, i, j: 0 <= i - j < 290),
    "heads": (
        [window(3), window(9, 1), window(3), window(70)],
        lambda h, i, j: [0 <= i - j < 3, 0 <= i - j < 18 and (i - j) % 2 == 0, 0 <= i - j < 3, 0 <= i - j < 70][h],
    ),
    "global": ([longformer(5, 3)], lambda h, i, j: j <= i and (i - j < 5 or j < 3)),
    "global beyond T": ([longformer(5, 300)], lambda h, i, j: j <= i),
    "strided": (
        [strided(6, "A1"), strided(6, "A2")] * 2,
        lambda h, i, j: max(0, i - 6) <= j <= i if h % 2 == 0 else j <= i and (i - j) % 6 == 0,
    ),
    "strided, merged": ([strided(6)], lambda h, i, j: j <= i and (j >= i - 6 or (i - j) % 6 == 0)),
    "strided by 1, merged": ([strided(1)], lambda h, i, j: j <= i),
    "fixed": (
        [fixed(8, 3, "A1"), fixed(8, 3, "A2")] * 2,
        lambda h, i, j: j <= i and (j // 8 == i // 8 if h % 2 == 0 else j % 8 >= 5),
    ),
    "fixed, merged": ([fixed(8, 3)], lambda h, i, j: j <= i and (j // 8 == i // 8 or j % 8 >= 5)),
    "fixed, l = 1": ([fixed(1, 1)], lambda h, i, j: j <= i),
}


@functools.cache
def seen(name, H, T):
    """(H, T, T): which keys each query sees, one pair at a time."""
    sees = PATTERNS[name][1]
    return torch.tensor([[[sees(h, i, j) for j in range(T)] for i in range(T)] for h in range(H)])


def definition(q, k, v, name):
    """Means of the values of the keys that a query sees, weighed by exp(q k / sqrt(D)); a mean of none is 0."""
    H, T, D = q.shape[1:]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT / D**0.5).exp() * seen(name, H, T)  # (B, H, T, T)
    return weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def inputs(T, B=2, H=4, G=4, D=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T)
    q, k, v, g = (torch.randn(B, n, T, D, generator=generator, dtype=torch.float64) for n in (H, G, G, H))
    return *(x.to(dtype).requires_grad_() for x in (q, k, v)), g.to(dtype)


@pytest.mark.parametrize("name", PATTERNS)
def test_sparse_attention_equals_the_definition_and_its_gradients(name):
    patterns = PATTERNS[name][0]
    for T, G in [(1, 2), (2, 2), (31, 4), (31, 2), (31, 1), (64, 2), (100, 2)]:
        *qkv, g = inputs(T, G=G)
        wanted, found = definition(*qkv, name), sparse_attention(*qkv, patterns)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert_all_close(*(torch.autograd.grad(y, qkv, g) for y in (found, wanted)), tolerance=1e-11)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_mask_is_the_definition(name):
    patterns, t = PATTERNS[name][0], torch.arange(40)
    assert torch.equal(pattern_mask(patterns, t, t), seen(name, len(patterns), 40))


@pytest.mark.parametrize("name", ["dilated", "global", "fixed, merged"])
def test_bfloat16_and_autocast_round_like_their_number_format(name):
    """v, the weights and the result are rounded once each, and so are the results of up to two parts: 4 x 2^-9 of |v|.
    The scores' inputs are rounded before, equally for both. The mean |v| of the visible keys bounds the error; the
    maximum is used."""
    patterns = PATTERNS[name][0]
    q, k, v, _ = inputs(100, dtype=torch.bfloat16)
    wanted = definition(*(x.double() for x in (q, k, v)), name)
    found = sparse_attention(q, k, v, patterns)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4 * 2**-9 * v.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_attention(q.float(), k.float(), v.float(), patterns), found)


@pytest.mark.parametrize(
    ("pattern", "T", "causal"),
    [
        (window(10), 10, True),
        (window(10), 11, False),
        (strided(1), 50, True),
        (longformer(50, 1), 4, False),
        (fixed(9, 3), 9, True),
        (fixed(9, 3), 10, False),
        (fixed(9, 3, "A2"), 9, False),
    ],
)
def test_patterns_that_are_plainly_causal_are_known(pattern, T, causal):
    assert is_causal(pattern, T) == causal


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.slow
def test_flex_attention_has_the_same_masks(name, eager_flex):
    """As far as it runs without a GPU: uncompiled, forward only. Its block mask equals torch's."""
    T = 300
    q, k, v = (x.detach() for x in inputs(T, B=1, D=16, dtype=torch.float32)[:3])
    for pattern in dict.fromkeys(PATTERNS[name][0]):
        found = attend._by_flex_attention(q, k, v, pattern)
        torch.testing.assert_close(found, naive_sparse_attention(q, k, v, [pattern]), rtol=0, atol=1e-5)
        ours = attend._block_mask(pattern, T, q.device)
        torchs = eager_flex.create_block_mask(ours.mask_mod, None, None, T, T, device="cpu")
        assert ours.shape == torchs.shape
        for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, part), getattr(torchs, part))
        assert torch.equal(ours.to_dense(), torchs.to_dense())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("pattern", "T"),
    [(CAUSAL, 1), (CAUSAL, 300), (window(40), 128), (window(150, 1), 300), (strided(48), 300)],
    ids=str,
)
@pytest.mark.slow
def test_flex_attention_keeps_documents_apart(pattern, T, eager_flex):
    """Uncompiled, forward only, as above: documents of 1 to 200 tokens, some of which end with a block."""
    q, k, v = (x.detach() for x in inputs(T, B=3, D=16, dtype=torch.float32)[:3])
    starts = torch.zeros(3, T, dtype=torch.bool)
    starts[1, [t for t in (0, 1, 128, 200, 256) if t < T]] = starts[2, T - 1] = True
    found = attend._by_flex_attention(q, k, v, pattern, starts, scale=16**-0.5)
    torch.testing.assert_close(found, naive_sparse_attention(q, k, v, [pattern], starts), rtol=0, atol=1e-5)
    ours = attend._document_block_mask(pattern, starts)
    torchs = eager_flex.create_block_mask(ours.mask_mod, 3, None, T, T, device="cpu")
    assert torch.equal(ours.full_kv_num_blocks, torchs.full_kv_num_blocks)
    assert bool((ours.to_dense() >= torchs.to_dense()).all())
    if pattern in (CAUSAL, window(40)):  # those with gaps may have blocks whose visible pairs are of two documents
        assert torch.equal(ours.to_dense(), torchs.to_dense())


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("forgets", [False, True])
def test_compiled_flex_attention_agrees_with_the_definition(device, forgets):
    with suspended():
        agreement.flex(device, torch.bfloat16, 64, forgets=forgets)


@pytest.mark.gpu
def test_huge_scores_stay_finite():
    """Scores of about 10^6, where rounding is far below 1, so that recomputed weights are at most e."""
    q, k, v, g = inputs(100, dtype=torch.float32)
    y = sparse_attention(q * 1e3, k * 1e3, v, [strided(6)])
    y.backward(g)
    assert all(x.isfinite().all() for x in (y, q.grad, k.grad, v.grad))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "wanted", "said"),
    [
        ("cpu", torch.float64, 6, "masks", ""),
        ("cuda", torch.bfloat16, 64, "flex", ""),
        ("cuda", torch.float32, 8, "masks", "sparse attention uses masks, which is slower: flex needs 16 features"),
        ("cuda", torch.float64, 64, "masks", ""),
        ("mps", torch.float32, 64, "masks", ""),
    ],
)
def test_what_skips_nothing_is_said(device, dtype, head_dim, wanted, said, monkeypatch, capsys):
    say_once.cache_clear()
    assert attend._form(SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 8, head_dim))) == wanted
    out = capsys.readouterr().out
    assert said in out if wanted == "masks" else "slower" not in out


CONFIGS = {
    "sliding_window": SlidingWindowConfig(name="sliding_window", window=5),
    "longformer": LongformerConfig(name="longformer", window=5, n_global=4),
    "strided, merged": StridedConfig(name="strided", stride=6, merge=True, n_kv_head=2),
}


def build(name):
    return CONFIGS[name].build(8, 4, 6).double()


def gpt_of(block="glu", **attention):
    sizes = {"n_vocab": 16, "n_layer": 1, "n_head": 4, "head_dim": 6, "n_embd": 8}
    parts = {"block": {"name": block}, "position": {"name": "none"}, "attention": attention}
    return GPT(decode(GPTConfig, sizes | parts))


@pytest.mark.parametrize("block", ["glu", "mlp"])
def test_global_projections_begin_equal_to_the_others(block):
    module = gpt_of(block, name="longformer", window=4, n_global=3).blocks[0].attention
    assert torch.equal(module.qkv.weight, module.qkv_global.weight)
    assert torch.equal(module.qkv.bias, module.qkv_global.bias)
    assert module.qkv.weight is not module.qkv_global.weight


def test_flops_count_global_projections_for_global_tokens_alone():
    """4 of 100 tokens meet them; with all global, all do."""
    gpts = gpt_of(name="longformer", window=5, n_global=4), gpt_of(name="sliding_window", window=5)
    longformer, plain = (gpt.flops_per_token(100) for gpt in gpts)
    keys = build("longformer").mask(100).sum().item() - build("sliding_window").mask(100).sum().item()
    assert longformer - plain == pytest.approx(6 * 8 * 3 * 4 * 6 * 4 / 100 + 3 * 4 * 4 * 6 * keys / 100, abs=6)


@pytest.mark.parametrize(
    ("config", "n_head", "message"),
    [
        (
            SlidingWindowConfig(name="sliding_window", window=[4, 5]),
            4,
            "window lists 2 for n_head=4: give one for each",
        ),
        (SlidingWindowConfig(name="sliding_window", dilation=[1] * 5), 4, "dilation lists 5 for n_head=4"),
        (StridedConfig(name="strided"), 1, "n_head=1 leaves no head for A2: set merge=true"),
    ],
)
def test_what_does_not_go_together_is_refused(config, n_head, message):
    assert config.mismatch(n_head, 2).startswith(message)
