"""What followed the last time: for each token, the one after the latest earlier occurrence of the
last n tokens.

Strings are found by their hashes in a table, whose size does not depend on the length of the text.
So this recalls exactly what a state of constant size mixes: it is an induction head of fixed form.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_PRIME = 2**31 - 1
_BASES = (1_103_515_245, 1_664_525_023)
"""Of two polynomials: one gives a string's slot, and the other tells strings of one slot apart."""
_ID_BITS = 24
"""Bits of a token id in an entry. GPTConfig has at most 2^24 ids and strings of 64, whose sums are
less than 2^62."""
_NONE = -1


class NGramState(NamedTuple):
    """What later tokens need. Both tensors are int64."""

    recent: Tensor
    """The last tokens of the document, as many as the longest string; -1 where it has fewer. (B,
    max(lengths))"""
    table: Tensor
    """Hash of the last string in each slot, and the token after it; -1: none. One more slot is for
    strings that would begin before their document, and stays empty. (B, lengths, n_slots + 1)"""


def no_ngrams(B: int, lengths: Sequence[int], n_slots: int, device: torch.device) -> NGramState:
    """The state of B texts before their first tokens."""
    shapes = (B, max(lengths)), (B, len(lengths), n_slots + 1)
    return NGramState(*(torch.full(shape, _NONE, device=device) for shape in shapes))


def ngram_followers(
    token_ids: Tensor, lengths: Sequence[int], state: NGramState, starts: Tensor | None = None
) -> tuple[Tensor, NGramState]:
    """For each n in `lengths`: the token after the latest earlier occurrence of the n tokens that
    end here.

    A string is forgotten when another is written to its slot. Two strings share a slot with a
    probability of 1 / n_slots, always or never, and are taken for the same with a probability of
    2^-31.

    Args:
        token_ids: (B, T), from 0 to 2^24 - 1.
        state: after the tokens before these.
        starts: (B, T), bool: these tokens begin documents, which do not see earlier ones.

    Returns:
        Token ids (B, lengths, T), with -1 where there was no such string, and the state.
    """
    (recent, table), T, spare = state, token_ids.shape[1], state.table.shape[2] - 1
    ids = torch.cat([recent, token_ids], dim=1)
    number = (
        torch.zeros_like(ids) if starts is None else pad(starts.cumsum(1), (ids.shape[1] - T, 0))
    )
    document, last_document = number[:, None, -1 - T :], number[:, None, -1:]
    slots, hashes = _hashes(
        ids, number, lengths, spare
    )  # (B, lengths, 1 + T): from the last of `recent` on
    entries = (hashes[..., :T] << _ID_BITS) + token_ids.unsqueeze(
        1
    )  # a string, and what follows it

    # A string finds what the string before it in its slot left there, or else what is in the table.
    # Each document has slots of its own in this order, and the table is that of the first.
    own_slots = slots + document * (spare + 1)
    order = own_slots.argsort(dim=2, stable=True)
    in_order, back = own_slots.gather(2, order), order.argsort(dim=2)
    same = in_order[..., 1:] == in_order[..., :-1]
    before = pad(order[..., :-1].where(same, _NONE), (1, 0), value=_NONE).gather(
        2, back
    )  # an index; -1: none
    found = table.gather(2, slots).masked_fill(document > 0, _NONE)
    found = entries.gather(2, before.clamp(0, T - 1)).where(before >= 0, found)
    followers = followers_in(found).where((slots < spare) & (found >> _ID_BITS == hashes), _NONE)[
        ..., 1:
    ]

    is_last = pad(~same | (order[..., 1:] == T), (0, 1), value=True).gather(2, back)
    written = (is_last & (slots < spare) & (document == last_document))[..., :T]
    if starts is not None:
        table = table.masked_fill(last_document > 0, _NONE)
    table = table.scatter(2, slots[..., :T].where(written, spare), entries.where(written, _NONE))
    return followers, NGramState(ids[:, T:].where(number[:, T:] == number[:, -1:], _NONE), table)


def followers_in(table: Tensor) -> Tensor:
    """The token after each string of a table; -1: there is no string."""
    return torch.where(table >= 0, table & (2**_ID_BITS - 1), _NONE)


def _hashes(
    ids: Tensor, number: Tensor, lengths: Sequence[int], spare: int
) -> tuple[Tensor, Tensor]:
    """The slot of the string of each length that ends at each token, and its hash: (B, lengths, T -
    max(lengths) + 1).

    Strings that would begin before their document have the slot `spare`. `number` is that of each
    token's document.
    """
    most, end = max(lengths), ids.shape[1]
    t = torch.arange(end, device=ids.device)
    is_new = number != pad(number, (1, 0))[:, :-1]
    first = torch.where(ids < 0, t + 1, t.where(is_new, 0)).cummax(1).values  # of the document
    seen, kept = (t + 1 - first)[:, most - 1 :], []
    sums = [torch.zeros_like(seen)] * len(_BASES)
    for n in range(1, 1 + most):
        x = ids[:, most - n : end + 1 - n] + 2
        sums = [
            torch.add(s, x, alpha=pow(base, n, _PRIME))
            for s, base in zip(sums, _BASES, strict=True)
        ]
        if n in lengths:
            kept.append((*sums, seen >= n))
    slots, hashes, whole = (torch.stack(values, dim=1) for values in zip(*kept, strict=True))
    return (slots % _PRIME % spare).where(whole, spare), hashes % _PRIME
