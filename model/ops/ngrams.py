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
# Two polynomials: one gives a string's slot, and the other tells strings of one slot apart.
_SLOT_BASE = 1_103_515_245
_HASH_BASE = 1_664_525_023
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
    recent = torch.full((B, max(lengths)), _NONE, device=device)
    table = torch.full((B, len(lengths), n_slots + 1), _NONE, device=device)
    return NGramState(recent, table)


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
    # Number the documents, so that strings of one are not found in another.
    recent, table = state
    T = token_ids.shape[1]
    spare = table.shape[2] - 1
    ids = torch.cat([recent, token_ids], dim=1)
    documents = torch.zeros_like(ids)  # each token's, counted; 0: the one that the state has read
    if starts is not None:
        documents = pad(starts.cumsum(1), (recent.shape[1], 0))
    document = documents[:, None, -1 - T :]
    last_document = documents[:, None, -1:]
    # Hash the strings that end at recent's last token and at each new one: (B, lengths, 1 + T).
    slots, hashes = _hashes(ids, documents, lengths, spare)
    is_string = slots < spare
    # The hash of a string, and the token after it.
    entries = (hashes[..., :T] << _ID_BITS) + token_ids.unsqueeze(1)

    # What followed: the previous string in the same slot tells, or else the table, which only
    # document 0 may read. Each document has slots of its own here.
    previous, following = _neighbours(slots + document * (spare + 1))
    stored = table.gather(2, slots).masked_fill(document > 0, _NONE)
    latest = entries.gather(2, previous.clamp(min=0)).where(previous >= 0, stored)
    is_same_string = is_string & (latest >> _ID_BITS == hashes)
    followers = (latest & (2**_ID_BITS - 1)).where(is_same_string, _NONE)[..., 1:]

    # Write the last string of each slot. The string that ends at T has no follower yet.
    is_last = (following < 0) | (following == T)
    is_written = (is_last & is_string & (document == last_document))[..., :T]
    if starts is not None:
        table = table.masked_fill(last_document > 0, _NONE)
    written_slots = slots[..., :T].where(is_written, spare)
    table = table.scatter(2, written_slots, entries.where(is_written, _NONE))
    # Keep the last tokens, for strings that go on in the next call.
    recent = ids[:, T:].where(documents[:, T:] == documents[:, -1:], _NONE)
    return followers, NGramState(recent, table)


def _neighbours(keys: Tensor) -> tuple[Tensor, Tensor]:
    """For each key (B, lengths, n): where the same key occurred last, and where it occurs next; -1:
    nowhere."""
    order = keys.argsort(stable=True)
    rank = order.argsort()
    in_order = keys.gather(2, order)
    is_same = in_order[..., 1:] == in_order[..., :-1]
    previous = pad(order[..., :-1].where(is_same, _NONE), (1, 0), value=_NONE)
    following = pad(order[..., 1:].where(is_same, _NONE), (0, 1), value=_NONE)
    return previous.gather(2, rank), following.gather(2, rank)


def _hashes(
    ids: Tensor, documents: Tensor, lengths: Sequence[int], spare: int
) -> tuple[Tensor, Tensor]:
    """The slot of the string of each length that ends at each token, and its hash: (B, lengths, T -
    max(lengths) + 1).

    Strings that would begin before their document have the slot `spare`.
    """
    longest = max(lengths)
    end = ids.shape[1]
    t = torch.arange(end, device=ids.device)
    is_first = documents != pad(documents, (1, 0))[:, :-1]
    first = torch.where(ids < 0, t + 1, t.where(is_first, 0)).cummax(1).values  # of the document
    n_seen = (t + 1 - first)[:, longest - 1 :]  # tokens of the document so far
    slot_sum = torch.zeros_like(n_seen)
    hash_sum = slot_sum
    slots = []
    hashes = []
    for n in range(1, 1 + longest):
        # The n-th token from the end of each string; at least 1, so that it changes the sums.
        tokens = ids[:, longest - n : end + 1 - n] + 2
        slot_sum = torch.add(slot_sum, tokens, alpha=pow(_SLOT_BASE, n, _PRIME))
        hash_sum = torch.add(hash_sum, tokens, alpha=pow(_HASH_BASE, n, _PRIME))
        if n in lengths:
            slots.append((slot_sum % _PRIME % spare).where(n_seen >= n, spare))
            hashes.append(hash_sum % _PRIME)
    return torch.stack(slots, dim=1), torch.stack(hashes, dim=1)
