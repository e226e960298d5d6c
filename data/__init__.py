"""From text to training batches, stage by stage. Nothing here knows of models, devices or processes of a training run.

1. `sources`    A source yields documents in a fixed order: Python's own library, text files, .jsonl files (`archives`
                unpacks them), a Hugging Face dataset. What cannot be read is yielded too, with its reason.
2. `tokenizer`  Text becomes token ids: `bytes` or `gpt2`. A tokenizer saves itself as one JSON file, so a dataset or a
                checkpoint carries its own and works offline.
3. `encode`     Batches of documents go through worker processes. Each document is tokenised and falls into training or
                validation by a hash of its bytes: order, split and shards are the same for any number of workers.
4. `shards`     The dataset directory: shards of token ids, tokenizer.json, and a manifest that counts and checksums
                them. `prepare` runs stages 1 to 4 beside its final place and renames it: it is whole or absent.
                `build` and `assembly` do the writing, with a `journal` from which a run that was killed goes on, and
                `dedup`, which drops texts that were there before; `merge` joins what several machines prepared.
5. `loader`     `batch(step)` is a pure function of (dataset, seed, step): windows of the token stream in an order that
                a keyed permutation gives without memory. Evaluation covers every target of a split exactly once.
"""
