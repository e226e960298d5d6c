"""From sources to a dataset directory, stage by stage. Training reads what is written here and imports none of it.

1. `sources`    A source yields documents in a fixed order: Python's own library, text files, .jsonl files (`archives`
                unpacks them), a Hugging Face dataset. What cannot be read is yielded too, with its reason.
2. `encode`     Batches of documents go through worker processes. Each document is tokenised and falls into training or
                validation by a hash of its bytes: order, split and shards are the same for any number of workers.
3. `dataset`    `prepare` runs all stages in a folder beside the final one and renames it: a dataset is whole or absent.
                `build`, `assembly` and `writer` write; a killed run continues from its `journal`; `dedup` drops texts
                that were there before; `merge` joins what several machines prepared.
4. `verify`     Everything is counted and summed again; `inspect` shows a dataset.
"""
