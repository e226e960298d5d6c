"""Training steps of whole models side by side: tokens per second, peak memory, and their ratios to gpt2_124m.

    python scripts/bench_train.py                     # heinsen_125m against gpt2_124m, T=1024
    python scripts/bench_train.py seq_len=8192 rounds=1
    python scripts/bench_train.py nanogpt=../nanoGPT batch=16 steps=10   # beside a clone of github.com/karpathy/nanoGPT

Every measurement runs in its own process, and the models take turns in every round: one model's leftovers
(allocator, caches) do not slow the next, and other load on the machine slows all of them. On Linux these processes give
every tensor of a MB or more its own pages, so that their peak memory is what the tensors take, without the allocator's
waste.

With `nanogpt` the model.py of that folder is imported and run: name one that you trust. It has nanoGPT's optimizer, and
the tokens, the type and the loop of the others; it is compiled where they are.
"""

from pathlib import Path

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    models: Items[str] = ["heinsen_125m"]
    """files of configs/model"""
    set: Items[str] = []
    """options of train.py for all models, such as model.n_layer=2"""
    seq_len: PositiveInt = 1024
    """tokens of a sequence"""
    batch: PositiveInt = 1
    """sequences of a step"""
    steps: PositiveInt = 2
    """timed steps of a measurement, after three others"""
    rounds: PositiveInt = 3
    """measurements of each model"""
    nanogpt: Path | None = None
    """folder of a clone of nanoGPT: measures its GPT in the sizes of gpt2_124m, too"""
    out: Path = Path("runs/bench_train")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.train:bench")
