"""Shards and indexes as data/prepare writes them, of documents that a test makes up."""

import hashlib

import numpy as np

from common.settings import decode
from data.shards import RECORD, Shard, build_header, choose_dtype, name_shard


def write_shards(folder, split, documents, n_vocab=1000, shard_tokens=10**9, sets=None):
    """Write documents (arrays of ids, and the number of each one's set) as shards; a document fills a shard."""
    ends = np.cumsum([len(ids) for ids in documents])
    records = np.zeros(len(documents), RECORD)
    records["number"] = np.arange(1, len(documents) + 1)
    records["set"] = 0 if sets is None else sets
    shards = []
    first = 0
    while first < len(documents):
        begin = int(ends[first - 1]) if first else 0
        last = min(int(np.searchsorted(ends, begin + shard_tokens)) + 1, len(documents))
        mine = records[first:last].copy()
        mine["end"] = ends[first:last] - begin
        file = name_shard(split, len(shards))
        content = np.concatenate(documents[first:last]).astype(choose_dtype(n_vocab)).tobytes()
        index = build_header(n_vocab) + mine.tobytes()
        (folder / file).write_bytes(content)
        (folder / file.replace(".bin", ".idx")).write_bytes(index)
        shard = {
            "file": file,
            "tokens": int(mine["end"][-1]),
            "documents": len(mine),
            "sets": list(range(1 + int(records["set"].max()))),
            "sha256": hashlib.sha256(content).hexdigest(),
            "index_sha256": hashlib.sha256(index).hexdigest(),
        }
        shards.append(decode(Shard, shard))
        first = last
    return shards
