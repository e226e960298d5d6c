"""Examines this machine: versions, checks, rates and a training step; prints them, and what to do."""

import getpass
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cli import compose, to_dict
from common.console import count, say
from common.files import make_directory, refuse_foreign, write_json
from common.memory import out_of_memory
from common.settings import UserError, decode
from model.compiled import shortened
from model.gpt import GPT, GPTConfig
from model.graphs import use_graphs
from model.ops.checks import outcomes
from tools.bench.harness import Row, composed, in_own_process, print_table
from tools.bench.train import measure_rate
from tools.doctor.machine import findings, versions
from tools.doctor.rates import rates
from tools.plan.plan import PlanConfig, plan
from tools.plan.report import duration, gigabytes
from trainer.config import TrainConfig
from trainer.runtime import Runtime, maybe_compile, open_runtime

FLAGSHIP = ["experiment=pile_125m", "model=flagship_125m"]
OTHERS = (
    ["model=heinsen_125m"],
    ["model=softmax_125m"],
    ["model=gpt2_124m", "model/attention=sliding_window"],
)
"""Models that use, with the flagship, every operator that is checked at its first use on a GPU."""


def examine(out: Path | None, training: bool) -> None:
    """Print tables of this machine and lines of what to do; write all of it to `out`, too.

    Raises:
        UserError: something does not work.
    """
    if out is not None:
        make_directory(out.parent, "out")
        refuse_foreign(b'"machine"', out)
    free, problems, device = shutil.disk_usage(".").free, list[str](), "cuda" if torch.cuda.is_available() else "cpu"
    runtime = open_runtime(decode(TrainConfig, composed([*FLAGSHIP, f"runtime.device={device}"])).runtime)

    def part(name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or None; an error becomes a finding."""
        say(f"{name} ...")
        try:
            return work()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            why = f"{name} fails ({type(error).__name__}: {first}): report it with out=doctor.json"
            why = f"{name}: out of memory, use a machine with more" if out_of_memory(error) else why
            problems.append(first if isinstance(error, UserError) else why)
            return None

    about = part("versions", versions) or {}
    measured = part("rates", lambda: rates(runtime.device)) or []
    if device == "cuda":
        part("the checks of kernels", lambda: use_operators(runtime))
    trained = part("a training step", lambda: step(runtime, max(1, torch.cuda.device_count()))) if training else None
    checks = {name: why or "passed" for name, why in outcomes.items()}
    problems += [f"{name} {why}" for name, why in outcomes.items() if why]
    lines = [*findings(free), *problems]
    found = {"machine": about | {"free_disk": free}, "checks": checks, "rates": measured}
    found |= {"training": trained, "findings": lines}
    rows = {name.replace("_", " "): value for name, value in about.items() if value is not None}
    rows |= {"free memory": gigabytes(about.get("free_memory")), "free disk": gigabytes(free)}
    rows |= checks or {"kernels": "not checked, because no kernel can be used here"}
    if trained:
        rows["training"] = "{model} in {dtype}, {seq_len:,} tokens in a sequence".format_map(trained)
        rows["tokens per second"] = trained["tokens_per_second"]
        rows["a whole run"] = f"{duration(3600 * trained['hours'])} for {trained['tokens']:,} tokens"
    print_table("this machine", [{"what": name, "found": value} for name, value in rows.items()])
    print_table("matrix products, and copies (bytes read and written)", measured)
    for line in lines or ["nothing is wrong"]:
        say(f"- {line}")
    if out is not None:
        write_json(out, json.loads(without_names(json.dumps(found, ensure_ascii=False))))
        say(f"written to {out}")
    if problems:
        raise UserError(f"{count(len(problems), 'part')} of this did not work: the last lines say why")


def without_names(text: str) -> str:
    """Replace the names of host and user, and the user's folder."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = ""
    for name, stand_in in ((os.path.expanduser("~"), "~"), (platform.node(), "HOST"), (user, "USER")):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text) if len(name) > 1 else text
    return text


def use_operators(runtime: Runtime) -> None:
    """Train and decode a little with short models, so that `outcomes` has every check of operators and compilation.

    Raises:
        RuntimeError: a model fails; the others have been used.
    """
    work = (FLAGSHIP, *OTHERS)
    if runtime.device.type == "cpu":
        for words in work:
            _use_operators(words, runtime)
        return
    with ThreadPoolExecutor(len(work)) as threads:  # checks compile for minutes, each on one core
        used = [threads.submit(in_own_process, _use_operators, words, runtime) for words in work]
    for one in sorted(used, key=lambda one: one.exception() is not None):
        outcomes.update(one.result())


def _use_operators(words: list[str], runtime: Runtime) -> dict[str, str | None]:
    config = decode(TrainConfig, composed([*FLAGSHIP, *words]))
    model = decode(GPTConfig, json.loads(shortened(config.model)))
    gpt = GPT(model, config.data.reset_at(model.n_vocab - 1)).to(runtime.device, runtime.param_dtype)
    ids = torch.zeros(2, 97, dtype=torch.int64, device=runtime.device)
    with runtime.autocast():
        gpt.summed_loss(ids, ids).backward()
    with torch.inference_mode():
        _, state = gpt(ids, return_state=True)
        use_graphs(gpt, state)
    maybe_compile([], config.runtime, runtime, gpt)
    return outcomes


def step(runtime: Runtime, n_device: int) -> Row:
    """Tokens per second of one device in a run of the flagship, and what follows from them.

    Raises:
        UserError: it does not fit into memory.
    """
    config = decode(PlanConfig, to_dict(compose("plan", [*FLAGSHIP, f"n_device={n_device}"])))
    planned = plan(config)
    memory, room = planned["memory"], gigabytes(planned["device"]["memory"])
    most = memory["largest_micro_batch"] if runtime.device.type == "cuda" else 1  # on a CPU one takes seconds
    try:
        if memory["largest_micro_batch"] == 0:
            raise MemoryError
        # Half of the sequences that fit, as GPUs may need more memory.
        rate = measure_rate(config, -(-(most or 1) // 2), config.batch_size // n_device)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        needed = f"a training step of flagship_125m needs {gigabytes(memory['peak'])} of memory, and {room} are free"
        raise UserError(f"{needed}: use a machine with more, or a smaller model") from None
    times = plan(config.model_copy(update={"tokens_per_second": rate}))["time"]
    return {
        "model": "flagship_125m",
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "seq_len": config.seq_len,
        "tokens_per_second": rate,
        "mfu": times["mfu"],
        "tokens": times["tokens"],
        "hours": times["seconds"] / 3600,
    }
