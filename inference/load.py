"""A checkpoint's model, its tokenizer, and the device that it runs on."""

import json
import os
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from common.console import say_once
from common.files import name_of
from common.settings import JsonDict, Settings
from data.tokenizers.build import Tokenizer
from model.gpt import GPT
from runtime.checkpoint import MODEL_FILES, Checkpoint, load_model, open_checkpoint
from runtime.device import Compute, DeviceConfig, ProcessesConfig, choose_compute
from runtime.proof import prove_logits


class ModelConfig(Settings):
    """Which model to load, and where it runs."""

    parameters_for_threads: ClassVar[int] = 200_000_000
    """A smaller model runs in one thread on a CPU. A second one does not speed up a step of one
    token, and waits for the first where other work runs (docs/research.md)."""
    checkpoint: Path
    """A run directory (its newest checkpoint), or a checkpoint."""
    runtime: DeviceConfig


class Loaded(NamedTuple):
    """A model that is ready to be placed on a device."""

    checkpoint: Checkpoint
    gpt: GPT
    tokenizer: Tokenizer
    compute: Compute

    def place(self, device: torch.device, *, autocast: bool) -> GPT:
        """Move the model to `device`, for evaluation.

        Args:
            autocast: whether forward passes run in `compute.autocast()`, which needs float32
                weights for bfloat16 products; otherwise the weights get the runtime's dtype.
        """
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        say_once(f"running on {self.compute.shared_by(processes)}")
        dtype = self.compute.param_dtype if autocast else self.compute.dtype
        gpt = self.gpt.to(device, dtype).eval()
        if self.compute.proof:
            prove_logits(gpt, self.compute, autocast)
        return gpt

    def describe(self) -> JsonDict:
        """Return the description of the model in a stored result."""
        return {
            "run": self.checkpoint.run_dir.name,
            "checkpoint": self.checkpoint.path.name,
            "step": self.checkpoint.state.step,
        }

    def write_result(self, result: JsonDict, config: ModelConfig, kind: str) -> None:
        """Write a result into the run directory, as KIND.json and into evals/.

        The name in evals/ has the checkpoint, and every setting that affects the result and differs
        from its default.
        """
        defaults = config.default_values()
        values = config.model_dump(mode="json", exclude={"checkpoint", "runtime", "micro_batch"})
        words = [self.checkpoint.path.name]
        if kind != "eval":
            words.append(kind)
        for key, value in sorted(values.items()):
            if value != defaults[key]:
                is_list = isinstance(value, list)
                text = "-".join(map(str, value)) or "none" if is_list else value
                words.append(f"{key}={text}")
        if config.runtime.dtype != "auto":
            words.append(f"runtime.dtype={config.runtime.dtype}")
        name = name_of(words)
        text = json.dumps(result, indent=2, default=str) + "\n"
        self.checkpoint.write_result(f"evals/{name}.json", text)
        self.checkpoint.write_result(f"{kind}.json", text)


def load(config: ModelConfig) -> Loaded:
    """Load a checkpoint's model, and choose a device and dtype.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or there is no such device.
    """
    compute = choose_compute(config.runtime)
    checkpoint = open_checkpoint(config.checkpoint, MODEL_FILES)
    gpt, tokenizer = load_model(checkpoint)
    # By size alone, so that the bits do not depend on other work on this machine.
    is_small = compute.device.type == "cpu" and gpt.n_params() < config.parameters_for_threads
    shares = isinstance(config.runtime, ProcessesConfig)  # its work among processes instead
    if is_small and not shares and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return Loaded(checkpoint, gpt, tokenizer, compute)
