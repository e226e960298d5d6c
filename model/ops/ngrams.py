"""What followed the last time: for each token, the one after the latest earlier occurrence of the last n tokens.

Strings are found by their hashes in a table, whose size does not depend on the length of the text. So this recalls
exactly what a state of constant size mixes: it is an induction head of fixed form.
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
"""Bits of a token id in an entry. GPTConfig has at most 2^24 ids, so no product or entry is larger than 2^56."""
_NONE = -1


class NGramState(NamedTuple):
    """What later tokens need. Both tensors are int64."""

    recent: Tensor
    """The last tokens of the document, as many as the longest string; -1 where it has fewer. (B, max(lengths))"""
    table: Tensor
    """Hash of the last string in each slot, and the token after it; -1: none. One more slot is for strings that would
    begin before their document, and stays empty. (B, lengths, n_slots + 1)"""


def no_ngrams(B: int, lengths: Sequence[int], n_slots: int, device: torch.device) -> NGramState:
    """The state of B texts before their first tokens."""
    shapes = (B, max(lengths)), (B, len(lengths), n_slots + 1)
    return NGramState(*(torch.full(shape, _NONE, device=device) for shape in shapes))


def ngram_followers(
    token_ids: Tensor, lengths: Sequence[int], state: NGramState, starts: Tensor | None = None
) -> tuple[Tensor, NGramState]:
    """For each n in `lengths`: the token after the latest earlier occurrence of the n tokens that end here.

    A string is forgotten when another is written to its slot, which every other string is with a probability of
    1 / n_slots. Different strings are taken for the same with a probability of 2^-31.

    Args:
        token_ids: (B, T), from 0 to 2^24 - 1.
        state: after the tokens before these.
        starts: (B, T), bool: these tokens begin documents, which do not see earlier ones.

    Returns:
        Token ids (B, lengths, T), with -1 where there was no such string, and the state.
    """
    (recent, table), T, spare = state, token_ids.shape[1], state.table.shape[2] - 1
    ids = torch.cat([recent, token_ids], dim=1)
    number = torch.zeros_like(ids) if starts is None else pad(starts.cumsum(1), (ids.shape[1] - T, 0))
    slots, hashes = _hashes(ids, number, lengths, spare)  # (B, lengths, 1 + T): from the last of `recent` on
    entries = (hashes[..., :T] << _ID_BITS) + token_ids.unsqueeze(1)  # a string, and what follows it
    document = number[:, None, -1 - T :].expand_as(slots)
    last_document = number[:, None, -1:]

    by_slot = slots.argsort(dim=2, stable=True)
    sorted_slots, unsorted = slots.gather(2, by_slot), by_slot.argsort(dim=2)
    same = sorted_slots[..., 1:] == sorted_slots[..., :-1]
    before = pad(by_slot[..., :-1].where(same, _NONE), (1, 0), value=_NONE).gather(2, unsorted)
    """The string before in the same slot, as an index; -1: what is in the table."""
    is_last = pad(~same | (by_slot[..., 1:] == T), (0, 1), value=True).gather(2, unsorted)[..., :T]

    has_one = before >= 0
    found = entries.gather(2, before.clamp(0, T - 1)).where(has_one, table.gather(2, slots))
    of_document = document.gather(2, before.clamp(min=0)).where(has_one, 0) == document
    known = of_document & (slots < spare) & (found >> _ID_BITS == hashes)
    followers = followers_in(found).where(known, _NONE)[..., 1:]

    written = is_last & (document[..., :T] == last_document)
    table = table.masked_fill(last_document > 0, _NONE).scatter(2, slots[..., :T].where(written, spare), entries)
    table[..., spare] = _NONE
    return followers, NGramState(ids[:, T:].where(number[:, T:] == number[:, -1:], _NONE), table)


def followers_in(table: Tensor) -> Tensor:
    """The token after each string of a table; -1: there is no string."""
    return torch.where(table >= 0, table & (2**_ID_BITS - 1), _NONE)


def _hashes(ids: Tensor, document: Tensor, lengths: Sequence[int], spare: int) -> tuple[Tensor, Tensor]:
    """The slot of the string of each length that ends at each token, and its hash: (B, lengths, T - max(lengths) + 1).

    Strings that would begin before their document have the slot `spare`.
    """
    first = max(lengths) - 1
    own = document[:, first:]
    whole, sums = torch.ones_like(own, dtype=torch.bool), [torch.zeros_like(own)] * len(_BASES)
    slots, hashes = [], []
    for i in range(max(lengths)):
        x, its_document = (values[:, first - i : values.shape[1] - i] for values in (ids, document))
        whole = whole & (x >= 0) & (its_document == own)
        sums = [(s + (x + 2) * pow(base, i + 1, _PRIME)) % _PRIME for s, base in zip(sums, _BASES, strict=True)]
        if i + 1 in lengths:
            slots.append((sums[0] % spare).where(whole, spare))
            hashes.append(sums[1])
    return torch.stack(slots, dim=1), torch.stack(hashes, dim=1)
