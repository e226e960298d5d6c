"""Shards and indexes as data/prepare writes them, of documents that a test makes up."""

import hashlib

import numpy as np

from common.settings import decode
from data.shards import RECORD, Shard, index_header, shard_file, token_dtype


def write_shards(folder, split, documents, n_vocab=1000, shard_tokens=10**9, sets=None):
    """Write documents (arrays of ids, and the number of each one's set) as shards; a document fills a shard."""
    shards, first, ends = [], 0, np.cumsum([len(ids) for ids in documents])
    records = np.zeros(len(documents), RECORD)
    records["number"], records["set"] = np.arange(1, len(documents) + 1), 0 if sets is None else sets
    while first < len(documents):
        begin = int(ends[first - 1]) if first else 0
        last = min(int(np.searchsorted(ends, begin + shard_tokens)) + 1, len(documents))
        mine = records[first:last].copy()
        mine["end"] = ends[first:last] - begin
        file = shard_file(split, len(shards))
        content = np.concatenate(documents[first:last]).astype(token_dtype(n_vocab)).tobytes()
        index = index_header(n_vocab) + mine.tobytes()
        (folder / file).write_bytes(content)
        (folder / file.replace(".bin", ".idx")).write_bytes(index)
        sums = [hashlib.sha256(part).hexdigest() for part in (content, index)]
        known = list(range(1 + int(records["set"].max())))
        shard = {"file": file, "tokens": int(mine["end"][-1]), "documents": len(mine), "sets": known}
        shards.append(decode(Shard, shard | dict(zip(("sha256", "index_sha256"), sums, strict=True))))
        first = last
    return shards
