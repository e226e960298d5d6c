"""From sources to a dataset directory, stage by stage. Training imports nothing of this package.

1. `sources`    A source yields documents in a fixed order: Python's own library, text files, .jsonl
                files (`archives` unpacks them), a Hugging Face dataset. It also yields unreadable
                items, with the reason. `items` defines what it yields.
2. `encode`     Worker processes tokenize batches of documents. Batches come back in input order.
3. `spans`      Each document falls into training or validation by a hash of its text, and into the
                shard where it stays. A stopped run continues after its last span.
4. `finish`     Renames the shards. One last rename makes the dataset complete.
5. `verify`     Recomputes everything the manifest says; `inspect` shows a dataset.

`dataset` runs stages 1 to 4. `vocabulary` learns a tokenizer from a dataset.
"""
