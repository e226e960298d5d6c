"""Measure decoding: tokens per second at several positions of a text, and bytes of the state that it takes.

    python scripts/bench_decode.py                                    # heinsen_1m
    python scripts/bench_decode.py models=gpt2_124m hf=gpt2_124m      # beside Hugging Face's GPT-2 with its cache
    python scripts/bench_decode.py models=gpt2_124m attention=all     # every mechanism in that shape

Weights and tokens are random. A model reads a few tokens, and repeating the last column of its cache stretches the
state to a position: time depends on shapes alone, so this costs what a text would. From there it decodes on, each step
from the state that the step before has left. All positions and both libraries take turns, step by step, in random
order, so that whatever else the machine does slows all of them.
"""

from pathlib import Path

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    models: Items[str] = ["heinsen_1m"]
    """files of configs/model"""
    attention: Items[str] = []
    """files of configs/model/attention for each model, or all; []: each model's own"""
    set: Items[str] = []
    """options of train.py for all models, such as model.n_layer=2"""
    positions: Items[PositiveInt] = [1_000, 8_000, 64_000]
    """tokens before the first decoded one"""
    steps: PositiveInt = 50
    """timed steps, each one position further: few, compared to the positions"""
    hf: str | None = None
    """a file of configs/model: measures Hugging Face's GPT-2 of this shape, too"""
    out: Path = Path("runs/bench_decode")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.decode:bench")
