"""Pseudorandom orders of any length that take no memory: each place is computed on demand."""

import hashlib

import numpy as np


def shuffle_places(places: np.ndarray, n: int, key: str) -> np.ndarray:
    """Return the members at `places` of an endless sequence of different shuffles of range(n).

    int64 (m,) -> int64 (m,).
    """
    shuffles, places_within = np.divmod(places, n)
    members = np.empty_like(places_within)
    for number in np.unique(shuffles).tolist():
        in_shuffle = shuffles == number
        members[in_shuffle] = permute_places(places_within[in_shuffle], n, key=f"{key}/{number}")
    return members


def permute_places(places: np.ndarray, n: int, key: str) -> np.ndarray:
    """Return where a permutation of range(n) puts `places`, without a table.

    int64 (m,) -> int64 (m,). A Feistel network permutes the next power of four; places that land
    outside range(n) pass through it again until they are inside ("cycle walking"; Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002). On average that is less than four passes.
    """
    half_bits = np.uint64((max(n - 1, 1).bit_length() + 1) // 2)
    round_keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=64).digest(), "<u8")
    values = places.astype(np.uint64)
    walking = np.ones(values.shape, bool)
    while walking.any():
        values[walking] = _feistel(values[walking], half_bits, round_keys)
        walking = values >= n
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    """Permute the uint64 numbers below 4**half_bits.

    Each round xors one half of the bits with a hash of the other half.
    """
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left = values >> half_bits
    right = values & mask
    for round_key in round_keys:
        mixed = left ^ (_mix(right + round_key) & mask)
        left = right
        right = mixed
    return (left << half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
