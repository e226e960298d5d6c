"""Time what is asked for, beside a reference in the same run: operators, training, decoding, preparing data.

    python scripts/bench.py                                                    # attention and recurrence
    python scripts/bench.py what=train models=gpt2_124m,flagship_125m nanogpt=../nanoGPT
    python scripts/bench.py what=decode models=flagship_125m hf=gpt2_124m profile=true out=decode.json
    python scripts/bench.py what=data 'set=[data=jsonl,data.path=pile/*.jsonl.zst,tokenizer=gpt2,workers=2]'

Contenders take turns in random order, so that whatever else the machine does slows all of them; figures are medians.
Training runs every measurement in its own process, so peak memory is the model's own. Decoding begins from a
state that is stretched to a position: time depends on shapes alone. With `nanogpt` the model.py of that folder is run:
name one that you trust.
"""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    what: Items[Literal["operators", "train", "decode", "data"]] = ["operators"]
    """what to time: operators, train, decode, data"""
    profile: bool = False
    """true: also show which functions or kernels take the time, and where the CPU waits for a GPU"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda; auto is a GPU if there is one"""
    rounds: PositiveInt = 3
    """measurements of each contender"""
    out: Path | None = None
    """a .json file for all figures"""
    lengths: Items[PositiveInt] = [1024, 4096]
    """operators: lengths in tokens"""
    heads: PositiveInt = 12
    """operators: attention heads"""
    head_dim: PositiveInt = 64
    """operators: features of a head"""
    seconds: NonNegativeFloat = 0.2
    """operators: least length of a measurement"""
    batch: PositiveInt = 1
    """operators, train: sequences"""
    models: Items[str] = ["gpt2_124m", "flagship_125m"]
    """train, decode: files of configs/model"""
    set: Items[str] = []
    """train, decode: options of train.py; data: options of scripts/prepare_data.py"""
    seq_len: PositiveInt = 1024
    """train: tokens of a sequence"""
    steps: PositiveInt = 3
    """train, decode: timed steps of a measurement, after three others"""
    nanogpt: Path | None = None
    """train: folder of a clone of nanoGPT; the first row is its GPT in the sizes of the first of `models`"""
    positions: Items[PositiveInt] = [1_000, 8_000, 64_000]
    """decode: tokens before the first decoded one"""
    hf: str | None = None
    """decode: a file of configs/model; the first row is GPT-2 of Hugging Face's transformers in its shape"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.run:bench")
