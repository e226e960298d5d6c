"""From sources to a dataset directory, stage by stage. Training reads the result and imports nothing of this package.

1. `sources`    A source yields documents in a fixed order: Python's own library, text files, .jsonl files (`archives`
                unpacks them), a Hugging Face dataset. What cannot be read is yielded too, with its reason.
                `items` are what it yields.
2. `encode`     Worker processes tokenize batches of documents. Batches come back in input order.
3. `parts`      Every few seconds, a part of the documents is finished on the disk. A run that was stopped goes on after
                the last part; with num_tasks, each machine writes parts of its own.
4. `join`       All parts become one dataset: duplicates are dropped, each document falls into training or validation by
                a hash of its text, `writer` fills the shards. A rename makes the dataset whole or absent.
5. `verify`     Recomputes everything the manifest says; `inspect` shows a dataset.

`dataset` runs stages 1 to 4 on one machine, `merge` runs stage 4 for several. `vocabulary` learns a tokenizer from a
dataset.
"""
