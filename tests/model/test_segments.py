"""Sequences whose segments programs of the kernels compute in parallel, against the definition and a single sweep."""

import itertools

import pytest
import torch
from definition import Definition
from gradients import tiles
from test_log_attention_fuzz import ROUNDINGS

from model.ops.log_attention import LogAttentionState
from model.ops.log_attention.triton import fastest_segments, triton_log_attention


def inputs(T, gates, d_k=3, d_v=4):
    """q, k, log_v, gates and a state of a sequence with two heads; gates of -inf are resets.

    Where there are resets, they are at borders of segments, beside them, and within.
    """
    generator = torch.Generator().manual_seed(T)
    shapes = [(T, d_k), (T, d_k), (T, d_v), (T, 1), (d_k, d_v), (d_k,)]
    q, k, log_v, log_f, *state = (torch.randn(1, 2, *s, generator=generator, dtype=torch.float64) for s in shapes)
    log_f = -gates * log_f.abs()
    if gates == 0.1:
        log_f[:, 0, 63:T:64], log_f[:, 1, 128:T:64], log_f[:, :, 30] = (-torch.inf,) * 3
    return [q, k, log_v, log_f, *state]


def results(leaves, segments, has_state=True, dtype=torch.float32):
    """log_y, the state after, and all gradients."""
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    q, k, log_v, log_f, *state = leaves
    state = LogAttentionState(*state) if has_state else None
    log_y, after = triton_log_attention(q, k, log_v, log_f, state=state, return_state=True, segments=segments)
    outputs = [log_y, *after]
    weights = [weights_of(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves[: 6 if has_state else 4], weights)]


def weights_of(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)


@pytest.mark.parametrize(
    ("T", "segments", "gates", "has_state"),
    [
        (130, 3, 0.1, True),
        *(pytest.param(T, 2, 3.0, True, marks=pytest.mark.slow) for T in (1, 65)),
        pytest.param(129, 2, 1e-3, False, marks=pytest.mark.slow),
        *(pytest.param(300, n, gates, True, marks=pytest.mark.slow) for n, gates in [(3, 3.0), (5, 0.1)]),
    ],
)
def test_segments_give_the_numbers_of_the_definition_twice_with_the_same_bits(T, segments, gates, has_state):
    leaves = [x.float() for x in inputs(T, gates)]
    if not has_state:
        leaves[4:] = (torch.full_like(x, -torch.inf) for x in leaves[4:])
    before = tiles()
    got = results(leaves, segments, has_state)
    assert tiles() == before
    definition = Definition(*leaves[:3], *leaves[4:], causal=True, log_f=leaves[3])
    truth = definition.forward()
    gradients = definition.backward(*map(weights_of, truth.values), truth.units[0])
    eps = torch.finfo(torch.float32).eps
    wanted = zip([*truth.values, *gradients.values], [*truth.units, *gradients.units], strict=True)
    for one, again, (exact, unit) in zip(got, results(leaves, segments, has_state), wanted, strict=False):
        assert torch.equal(one, again)
        assert ((one - exact).abs() <= ROUNDINGS * eps * unit).all()


@pytest.mark.slow
def test_a_frame_that_shrinks_between_segments_loses_no_gradient():
    """Many large keys decay by nearly as much as a frame can shrink in a chunk, and keys beside them count as much."""
    q, k, log_v, log_f, log_s, log_z = (x[:, :1] for x in inputs(192, 0.0, d_k=1, d_v=1))
    k[:, :, :64], k[:, :, 64:128], k[:, :, 128:] = 27.0, -6.0, -20.0
    log_f[:, :, 64] = -31.0
    leaves = [q, k, log_v, log_f, log_s, log_z]
    before = tiles()
    for one, two in zip(results(leaves, 3), results(leaves, 1), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert tiles() == before


@pytest.mark.slow
def test_what_follows_a_doubtful_segment_is_computed_exactly():
    """A chunk forgets a key by more than a frame can shrink: what comes later cannot be certain of the others."""
    leaves = [x[:, :1] for x in inputs(65, 0.0, d_k=1, d_v=1)]
    leaves[1][:, 0, 0], leaves[3][:, 0, 1] = 60.0, -60.0
    found, counts = [], [tiles()]
    for segments in (2, 1):
        found.append(results(leaves, segments))
        counts.append(tiles())
    both, *others = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(counts))
    assert others == [both] == [[2, 2]]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("programs", "chunks", "segments"),
    [
        (14, 512, 18),  # the flagship on 132 multiprocessors: a text of 32,768 tokens
        (14, 16, 8),
        (14, 4, 1),  # two sweeps and their launch take longer than one
        (132, 512, 2),
        (133, 512, 1),  # a second segment would wait for the first
    ],
)
def test_segments_fill_the_multiprocessors_if_that_is_faster(programs, chunks, segments):
    assert fastest_segments(programs, chunks, at_once=264) == segments
