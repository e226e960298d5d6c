"""Strings that occurred before: against a dictionary of all strings, in pieces, by documents; and in the model."""

import functools
import itertools

import pytest
import torch
from gradients import assert_all_close, with_gradients
from test_blocks import defined
from test_blocks import gpt_of as blocks_gpt_of
from test_gpt import tiny

from model.config import GPTConfig
from model.gpt import GPT
from model.ops.ngrams import ngram_followers, no_ngrams
from model.state_trees import cat_states, select_rows

EOT = 10
CPU = torch.device("cpu")
MANY = 2**16
"""Slots: so many that no strings of these tests share one (seeds are fixed)."""
PRIME, BASE = 2**31 - 1, 1_103_515_245
close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)  # as in test_attention_contract


def definition(token_ids, lengths, starts, n_slots=None):
    """The followers, from all strings of each document; with n_slots, from those that are the last in their slots."""
    followers = torch.full((len(token_ids), len(lengths), token_ids.shape[1]), -1)
    for b, row in enumerate(token_ids.tolist()):
        for i, n in enumerate(lengths):
            seen, first = {}, 0
            for t, token in enumerate(row):
                if starts[b, t]:
                    seen, first = {}, t
                elif t - n >= first:
                    before = row[t - n : t]
                    seen[slot_of(before, n_slots)] = before, token
                if t + 1 - n >= first:
                    string = row[t + 1 - n : t + 1]
                    found, follower = seen.get(slot_of(string, n_slots), (None, -1))
                    followers[b, i, t] = follower if found == string else -1
    return followers


def slot_of(string, n_slots):
    """A polynomial of the ids, the last first, by Python's integers; without n_slots, each string has its own."""
    if n_slots is None:
        return tuple(string)
    return sum((x + 2) * BASE**i for i, x in enumerate(reversed(string), start=1)) % PRIME % n_slots


def texts(T, n_vocab, starts, B=3, seed=0):
    """Token ids and document starts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(n_vocab, (B, T), generator=generator)
    return ids, torch.rand(B, T, generator=generator) < starts


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1,), (2, 3), (1, 4, 7), (64,)], ids=str)
@pytest.mark.parametrize("T", [1, 2, 150])
@pytest.mark.parametrize(("n_vocab", "starts"), [(2, 0.05), (7, 0.0), (7, 0.3)])
def test_followers_are_those_of_the_definition(device, T, lengths, n_vocab, starts):
    ids, starts = texts(T, n_vocab, starts)
    found, _ = ngram_followers(ids, lengths, no_ngrams(3, lengths, MANY, device), starts)
    assert torch.equal(found, definition(ids, lengths, starts))
    if not starts.any():
        assert torch.equal(ngram_followers(ids, lengths, no_ngrams(3, lengths, MANY, device))[0], found)


def test_ids_may_have_24_bits():
    ids = torch.tensor([[2**24 - 1, 2**24 - 2, 2**24 - 1, 2**24 - 2, 0]])
    found, _ = ngram_followers(ids, (1, 2), no_ngrams(1, (1, 2), MANY, CPU))
    assert found.tolist() == [[[-1, -1, 2**24 - 2, 2**24 - 1, -1], [-1, -1, -1, 2**24 - 1, -1]]]


@pytest.mark.parametrize("pieces", [[1] * 90, [1, 40, 2, 30, 17], [89, 1]], ids=len)
@pytest.mark.parametrize("n_slots", [1, 5, 64])
@pytest.mark.parametrize("starts", [0.0, 0.05])
def test_pieces_have_the_followers_and_the_state_of_the_whole(pieces, n_slots, starts):
    ids, starts = texts(90, 3, starts)
    empty = state = no_ngrams(3, (1, 3), n_slots, CPU)
    whole, after = ngram_followers(ids, (1, 3), empty, starts)
    found = []
    for piece, start in zip(ids.split(pieces, dim=1), starts.split(pieces, dim=1), strict=True):
        followers, state = ngram_followers(piece, (1, 3), state, start if start.any() else None)
        found.append(followers)
    assert torch.equal(torch.cat(found, dim=2), whole)
    assert all(map(torch.equal, state, after))
    assert all(map(torch.equal, empty, no_ngrams(3, (1, 3), n_slots, CPU)))  # a state is a value


@pytest.mark.parametrize("n_slots", [1, 7, 64])
@pytest.mark.parametrize("starts", [0.0, 0.02])
def test_a_string_takes_the_place_of_the_one_in_its_slot(n_slots, starts):
    ids, starts = texts(300, 5, starts)
    found, _ = ngram_followers(ids, (1, 2, 4), no_ngrams(3, (1, 2, 4), n_slots, CPU), starts)
    assert torch.equal(found, definition(ids, (1, 2, 4), starts, n_slots))
    assert (found >= 0).sum() < (definition(ids, (1, 2, 4), starts) >= 0).sum()  # some are forgotten


gpt_of = functools.partial(blocks_gpt_of, {"conv": 4}, ngrams=[1, 3])


def ids_of(T, B=2, seed=1):
    return torch.randint(3, (B, T), generator=torch.Generator().manual_seed(seed))


def test_logits_and_gradients_are_the_definitions():
    gpt, token_ids = gpt_of(), ids_of(37)
    followers = definition(token_ids, (1, 3), torch.zeros(2, 37, dtype=torch.bool))
    W, gain, bias = gpt.ngrams.proj.weight, gpt.ngrams.gain.view(2, 12), gpt.ngrams.bias.view(3, 12)
    rows, longest = [], []
    for b, t in itertools.product(range(2), range(37)):
        x, (one, three) = gpt.embed.weight[token_ids[b, t]], followers[b, :, t]
        n, follower = (2, three) if three >= 0 else (1, one) if one >= 0 else (0, -1)
        rows.append(x + bias[n] + (W @ (gain[n - 1] * gpt.embed.weight[follower]) if n else 0))
        longest.append(n)
    assert min(longest.count(n) for n in range(3)) > 3
    x = torch.stack(rows).view(2, 37, 12)
    found, wanted = gpt(token_ids), defined(gpt, token_ids, x)
    assert_all_close(*(with_gradients(y, list(gpt.parameters())) for y in (found, wanted)), tolerance=1e-11)


@pytest.mark.parametrize("attention", ["log_space", "softmax"])
@torch.inference_mode()
def test_ngrams_and_convolutions_of_texts_of_several_lengths_go_on_together_and_apart(attention):
    gpt, lengths = gpt_of(attention), (1, 2, 9)
    rows = [ids_of(n + 12, B=1, seed=n) for n in lengths]
    state = cat_states([gpt(row[:, :n], return_state=True)[1] for row, n in zip(rows, lengths, strict=True)])
    outputs = []
    for piece in torch.cat([row[:, -12:] for row in rows]).split([1, 2, 5, 1, 3], dim=1):
        logits, state = gpt(piece, state, return_state=True)
        outputs.append(logits)
    close(torch.cat(outputs, 1), torch.cat([gpt(row)[:, -12:] for row in rows]))
    other, _ = gpt(ids_of(3, B=1), select_rows(state, [1]), return_state=True)
    close(other, gpt(torch.cat([rows[1], ids_of(3, B=1)], 1))[:, -3:])


@pytest.mark.parametrize("attention", ["log_space", "softmax"])
def test_ngrams_and_convolutions_do_not_cross_documents(attention):
    row = ids_of(60, B=1)
    row[0, [7, 8, 30]] = EOT
    gpt, alone = (gpt_of(attention, eot_id) for eot_id in (EOT, None))
    wanted = torch.cat([alone.features(document)[0] for document in row.tensor_split([7, 8, 30], dim=1)], 1)
    close(gpt.features(row)[0], wanted)
    close(gpt.features(row, return_state=True)[0], wanted)


def test_a_new_memory_changes_nothing():
    torch.manual_seed(0)
    with_ngrams = GPT(tiny(ngrams=[2, 5]))
    without = GPT(tiny())
    without.load_state_dict({name: p for name, p in with_ngrams.state_dict().items() if "ngrams" not in name})
    assert torch.equal(with_ngrams(ids_of(20)), without(ids_of(20)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ngrams": [3, 1]}, r"use \[1, 3\]"),
        ({"ngrams": [65]}, "or equal to 64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**tiny().model_dump() | change)


@pytest.mark.slow
def test_a_compiled_step_is_the_step():
    """As one graph under autocast: gradients of all parameters, convolutions, a recurrence, documents kept apart."""
    gpt, ids = gpt_of(position={"name": "log_recurrence"}, eot_id=EOT, n_layer=1).float(), ids_of(40)
    ids[0, [7, 8, 30]] = EOT

    def outcome(summed_loss):
        with torch.autocast("cpu", torch.bfloat16):
            loss = summed_loss(ids[:, :-1], ids[:, 1:])
        return loss, *torch.autograd.grad(loss, gpt.parameters())

    compiled = torch.compile(gpt.summed_loss, fullgraph=True, backend="aot_eager")
    for own, expected in zip(outcome(compiled), outcome(gpt.summed_loss), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)  # the same operations
