"""Prompts are read in chunks, larger ones on a GPU."""

from texts import BYTES, gpt_of, random_ids

from inference.engine import Engine
from inference.generation import Generation, Prefix, Request


def test_a_gpu_reads_a_prompt_in_larger_chunks(monkeypatch):
    gpt = gpt_of().to("meta")  # any device but the CPU
    sizes = []

    def read(gpt, ids, n_vocab, before):
        sizes.append(ids.shape[1])
        return Prefix(ids, None), ids

    monkeypatch.setattr("inference.engine.read", read)
    engine = Engine(gpt, 257, 1)
    engine.submit([Generation(Request(random_ids(3 * 2048 + 300)), BYTES)])
    engine.turn()
    assert sizes == [2048] * 3 + [300]
