"""What pages say that can be computed is what the code computes, and the keys and extras that they name exist."""

import functools
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from cli import compose
from common.config_files import CONFIGS, groups_of, keys_of
from common.settings import decode
from model.gpt import GPT
from model.ops.log_attention.naive_attention import KEY, QUERY, VALUE
from model.state_trees import state_bytes
from runtime.gpus import device_by_name
from tools.plan import PlanConfig, plan_run
from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


@functools.cache
def train_config(*options):
    return decode(TrainConfig, compose("train", ["dataset_dir=datasets/x", *options]))


@functools.cache
def gpt_of(model):
    with torch.device("meta"):
        return GPT(train_config(f"model={model}").model)


def n_params(model):
    return gpt_of(model).n_params()


def megabytes(model, part):
    """Of the state of one text, in float32: what its layers keep, or its n-grams."""
    gpt, device = gpt_of(model), torch.device("meta")
    if part == "ngrams":
        return state_bytes(gpt.ngrams.initial_state(1, device)) / 1e6
    return state_bytes([module.initial_state(1, device) for module in (gpt.position, *gpt.blocks)]) / 1e6


def n_ngram_slots(model):
    return gpt_of(model).ngrams.initial_state(1, torch.device("meta")).table.shape[-1] - 1  # one stays empty


def gigabytes_of_keys_and_values(model, n_tokens):
    config = gpt_of(model).config
    return config.n_layer * n_tokens * 2 * config.n_embd * 4 / 1e9


def n_tokens(experiment):
    config = train_config(f"experiment={experiment}")
    return config.max_steps * config.batch_tokens


def mfu(model, tokens_per_second):
    peak = device_by_name("h200").peak(torch.bfloat16)
    return tokens_per_second * gpt_of(model).flops_per_token(1024) / peak


def default(command, key):
    value = compose(command, [], complete=False)
    for name in key.split("."):
        value = value[name]
    return json.dumps(value).strip('"')


def days(experiment, tokens_per_second):
    return n_tokens(experiment) / tokens_per_second / 86_400


def choices(group):
    *names, last = groups_of("train")[group]
    return f"{', '.join(names)} or {last}"


PUBLISHED, FLAGSHIP = 433_400, 374_700  # tokens per second on an H200, measured
FIGURES = {
    "README": [
        lambda: f"`heinsen_125m` with {n_params('heinsen_125m'):,} parameters",
        lambda: "{0.batch_tokens:,} tokens per step, {0.max_steps:,} steps".format(
            train_config("experiment=pile_125m")
        ),
        lambda: f"on {n_tokens('pile_125m_2h') / 1e9:.1f} B tokens",
        lambda: f"on {n_tokens('fineweb_124m') / 1e9:.2f} B tokens of FineWeb",
        lambda: f"{days('pile_125m', PUBLISHED):.1f} days for the published recipe",
        lambda: f"{days('pile_125m_2h', FLAGSHIP) * 24:.1f} hours for `pile_125m_2h`",
        lambda: f"{days('fineweb_124m', FLAGSHIP) * 24:.1f} hours for `fineweb_124m`",
        lambda: f"({megabytes('flagship_125m', 'layers') + megabytes('flagship_125m', 'ngrams'):.1f} MB for 125M)",
        lambda: f"| 374,700 | {mfu('flagship_125m', FLAGSHIP):.2f} |",
        lambda: f"| 433,400 | {mfu('heinsen_125m', PUBLISHED):.3f} |",
        lambda: f"| 506,000, 525,000 | {mfu('gpt2_124m', 506_000):.2f}, {mfu('gpt2_124m', 525_000):.2f} |",
        lambda: f"({n_params('flagship_1m') / 1e6:.2f} M parameters)",
    ],
    "attention": [
        lambda: f"`model/block=` is {choices('model/block')}.",
        lambda: f"`model/position=` is {choices('model/position')}.",
        *(lambda name=name: f"| {name} | " for name in groups_of("train")["model/attention"]),
        lambda: f"q at {-QUERY[0]:.0f} below the query's largest, k at {KEY[0]:.0f} and {KEY[1]:.0f}",
        lambda: f"log_v at {VALUE[0]:.0f} and {VALUE[1]:.0f}",
        lambda: f"{n_ngram_slots('flagship_125m'):,} entries of 8 bytes for each length",
    ],
    "evaluation": [
        lambda: f"`top_k=50` ({default('sample', 'top_k')} by default)",
        lambda: f"`temperature` is {default('sample', 'temperature')} by default",
        lambda: f"Up to {default('sample', 'micro_batch')} continuations (`micro_batch`)",
        lambda: f"Up to {default('serve', 'max_streams')} texts (`max_streams`)",
        lambda: f"`cache_states={default('serve', 'cache_states')}`",
        lambda: f"`cache_bytes={default('serve', 'cache_bytes')}`",
        lambda: f"more than `max_queue={default('serve', 'max_queue')}` texts",
        lambda: f"above `max_prompt_tokens={default('serve', 'max_prompt_tokens')}`",
        lambda: f"`max_tokens` above {default('serve', 'max_tokens')}",
    ],
    "training": [
        lambda: (
            f"| `flagship_10m` | {megabytes('flagship_10m', 'layers'):.2f} MB, and "
            f"{megabytes('flagship_10m', 'ngrams'):.2f} MB of n-grams"
        ),
        lambda: f"| {gigabytes_of_keys_and_values('flagship_10m', 65_536):.1f} GB |",
        lambda: f"| `flagship_125m` | {megabytes('flagship_125m', 'layers'):.1f} MB",
        lambda: f"| {gigabytes_of_keys_and_values('flagship_125m', 65_536):.1f} GB |",
        lambda: f"| `heinsen_125m` | {megabytes('heinsen_125m', 'layers'):.1f} MB",
        lambda: f"| {gigabytes_of_keys_and_values('heinsen_125m', 65_536):.1f} GB |",
    ],
    "data": [lambda: f"({int(default('prepare', 'shard_tokens')) / 1e6:.0f} million)"],
    "research": [
        lambda: (
            f"state from {megabytes('flagship_125m', 'layers'):.1f} to "
            f"{megabytes('flagship_125m', 'layers') + megabytes('flagship_125m', 'ngrams'):.1f} MB"
        ),
    ],
}


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_on_a_page_is_what_the_code_computes(page):
    text = " ".join(PAGES[page].split())
    assert [figure() for figure in FIGURES[page] if figure() not in text] == []


def test_defaults_in_a_table_of_keys_are_those_of_training():
    rows = re.findall(r"^\| `([\w.]+)=([^`]+)` \|", PAGES["training"], re.M)
    assert len(rows) >= 7
    assert rows == [(key, default("train", key)) for key, _ in rows]


@pytest.mark.slow
def test_the_plan_on_a_page_is_the_plan(command):
    (shown,) = re.findall(r"n_device=8 mfu=0.4\n\n((?:    .*\n)+)", PAGES["sweeps"])
    said = command("scripts/plan", "experiment=pile_125m", "device=a100-40gb", "n_device=8", "mfu=0.4").out
    rows = [line.strip(" │├┤─┼").split("│")[-2:] for line in shown.splitlines() if "│" in line]
    assert len(rows) > 10
    found = " ".join(said.replace("│", " ").split())
    assert [row for row in rows if " ".join(" ".join(row).split()) not in found] == []


@pytest.mark.slow
def test_the_memory_on_a_page_is_planned():
    options = ["experiment=pile_125m", "device=h200", "runtime.micro_batch=32", "batch_tokens=32768"]
    memory = plan_run(decode(PlanConfig, compose("plan", options)))["memory"]
    assert f"{memory['peak'] / 1e9:.1f} GB are planned" in PAGES["sweeps"]
    said = " ".join(PAGES["training"].split())
    for recompute in ("none", "selective", "block"):
        options = [
            "experiment=pile_125m",
            "device=a100-40gb",
            "runtime.micro_batch=12",
            f"runtime.recompute={recompute}",
        ]
        planned = plan_run(decode(PlanConfig, compose("plan", options)))["memory"]["activations"]
        assert f"{planned / 1e9:.2f} GB with `{recompute}`" in said


OTHERS = {  # keys of other programs, and of Python
    *("add_generation_prompt", "backend", "device_map", "lines", "target_modules", "use_cache", "wandb_log"),
    *("hydra/launcher", "hydra/sweeper"),
}


@functools.cache
def known_keys():
    """The keys and groups of every command, and the last parts of keys, which pages use alone."""
    keys = set()
    for path in CONFIGS.glob("*.yaml"):
        keys |= groups_of(path.stem).keys()
        for key in keys_of(path.stem):
            keys |= {key, key.rpartition(".")[2]}
    return keys


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_a_page_names_exist(page):
    codes = re.findall(r"`([^`\n]+)`", PAGES[page])
    named = {key for code in codes for key in re.findall(r"(?:^|[ \"'])([a-z][\w./]*)=", code)}
    missing = {key for key in named - OTHERS - known_keys() if not key.startswith("hydra.")}
    assert {key for key in missing if page != "research" or "." in key} == set()  # which names keys of old commits


def test_extras_and_make_targets_that_pages_name_exist():
    text = "\n".join([*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text()])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[([\w-]+)\]'", text)) <= extras.keys()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M)) <= set(targets)
