"""From a dataset directory to batches, without models, devices or processes.

1. `tokenizers/` Text becomes token ids: `bytes`, `gpt2`, or any byte-level BPE. A tokenizer saves
                itself as one JSON file, so a dataset or a checkpoint carries its own and works
                offline.
2. `prepare/`   Documents become a dataset directory.
3. `shards`     The dataset directory: shards of token ids, tokenizer.json, and a manifest with
                counts and checksums. `document_index` finds documents.
4. `loader`     `batch(step)` is a pure function of (dataset, seed, step): windows of the token
                stream, in an order that a keyed permutation gives without memory. Evaluation covers
                every target of a split exactly once.
"""
