"""Every shipped YAML composes, is accepted by its class, and shows every setting."""

import functools

import pytest
import torch

from cli import compose as compose_command
from common.config_files import CONFIGS
from common.settings import Settings, decode
from data.prepare.dataset import PrepareConfig
from inference.evaluate import EvaluateConfig
from inference.harness import HarnessConfig
from inference.sample import SampleConfig
from inference.server.protocol import ServeConfig
from model.gpt import GPT
from tools.plan import PlanConfig
from trainer.config import TrainConfig

ROOTS = {  # the class of a command's configuration, and what a user must give
    "train": (TrainConfig, "dataset_dir=datasets/x"),
    "eval": (EvaluateConfig, "checkpoint=runs/x"),
    "sample": (SampleConfig, "checkpoint=runs/x"),
    "prepare": (PrepareConfig, "out_dir=datasets/x"),
    "plan": (PlanConfig, ""),
    "lm_eval": (HarnessConfig, "checkpoint=runs/x"),
    "serve": (ServeConfig, "checkpoint=runs/x"),
}
MEMBERS = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/**/*.yaml"))


@functools.cache
def compose(root, *overrides):
    """The plain dict that a command gets."""
    return compose_command(root, [*filter(None, [ROOTS[root][1]]), *overrides])


def assert_every_field_is_listed(settings, raw, where):
    """The YAML's keys are the class's fields, in every part of the configuration."""
    assert set(raw) == set(type(settings).model_fields), where
    for name, value in settings:
        if isinstance(value, Settings):
            assert_every_field_is_listed(value, raw[name], f"{where}.{name}")


def descendants(cls):
    for child in cls.__subclasses__():
        yield from (child, *descendants(child))


def test_a_class_whose_defaults_are_in_a_file_has_none_of_its_own():
    classes = [cls for cls in descendants(Settings) if cls._file and not cls.__module__.startswith("test")]
    assert len(classes) > 25
    for cls in classes:
        own = cls.model_fields.keys() & cls.__annotations__.keys()
        assert [name for name in own if not cls.model_fields[name].is_required()] == [], cls


@pytest.mark.parametrize("root", ROOTS)
def test_a_commands_own_configuration_lists_every_field(root):
    raw = compose(root)
    config = decode(ROOTS[root][0], raw)
    assert_every_field_is_listed(config, raw, root)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.slow
def test_every_member_of_every_group_composes_and_lists_every_field(member):
    group, _, name = member.rpartition("/")
    root = "prepare" if group in ("data", "tokenizer") else "train"
    path = CONFIGS / f"{member}.yaml"
    overrides = [f"{group}={name}"]
    if "path: ???" in path.read_text():
        overrides.append(f"{group}.path=files/*.txt")
    if "n_vocab: ???" in path.read_text():
        overrides.append(f"{group}.n_vocab=9")
    if name == "rotary":
        overrides.append("model/attention=softmax")  # the default model's attention does not take them
    raw = compose(root, *overrides)
    config = decode(ROOTS[root][0], raw)
    assert_every_field_is_listed(config, raw, member)


def test_a_yaml_begins_with_what_it_is():
    for path in CONFIGS.rglob("*.yaml"):
        first = path.read_text().removeprefix("# @package _global_\n").partition("\n")[0]
        assert first.startswith("# "), path
        assert first.endswith("."), path


KNOWN = {
    "heinsen_125m": 124_879_872,
    "gpt2_124m": 124_439_808,
    "flagship_hybrid_125m": 125_900_220,
}
LADDER = ("1m", "10m", "40m", "125m", "350m", "1b")
FLAGSHIP_ATTENTION = {"name": "log_space", "decay": "head", "product": True, "d_key": 16, "gate": "silu"}
CONTROL_ATTENTION = {"name": "softmax", "decay": "head", "gate": "silu"}


def model_of(name):
    return decode(TrainConfig, compose("train", f"model={name}")).model


@functools.cache
def n_params(name):
    with torch.device("meta"):
        return GPT(model_of(name)).n_params()


@pytest.mark.parametrize(
    "name", [*KNOWN, *(f"{kind}_{size}" for kind in ("flagship", "softmax", "modern") for size in LADDER)]
)
@pytest.mark.slow
def test_the_shipped_models_have_the_parameters_they_claim(name):
    parameters = n_params(name)
    assert KNOWN.get(name, parameters) == parameters
    assert f"{parameters:,} parameters" in (CONFIGS / "model" / f"{name}.yaml").read_text().splitlines()[0]


@pytest.mark.parametrize("size", LADDER)
def test_the_ladder_is_one_design_beside_its_control(size):
    ours, control = model_of(f"flagship_{size}"), model_of(f"softmax_{size}")
    assert abs(n_params(f"flagship_{size}") / n_params(f"softmax_{size}") - 1) < 0.01
    assert ours.attention.model_dump().items() >= FLAGSHIP_ATTENTION.items()
    assert control.attention.model_dump().items() >= CONTROL_ATTENTION.items()
    assert ours.position.name == control.position.name == "none"
    assert ours.block.conv == control.block.conv == 4
    different = {"attention", "n_head", "head_dim"}
    assert ours.model_dump(exclude=different) == control.model_dump(exclude=different)


@pytest.mark.parametrize("size", LADDER)
def test_the_modern_model_has_the_flagships_size_and_none_of_its_parts(size):
    ours, modern = model_of(f"flagship_{size}"), model_of(f"modern_{size}")
    assert abs(n_params(f"flagship_{size}") / n_params(f"modern_{size}") - 1) < 0.01
    same = {"n_vocab", "pad_vocab", "n_layer", "n_embd"}
    assert modern.model_dump(include=same) == ours.model_dump(include=same)
    parts = {"name": "softmax", "decay": "none", "gate": "none", "qk_norm": True, "n_kv_head": None}
    assert modern.attention.model_dump() == parts
    assert modern.block.model_dump() == {"name": "mlp", "expansion": 4, "activation": "relu2", "conv": 0}
    assert (modern.position.name, modern.norm, modern.bias, modern.logit_cap) == ("rotary", "rms", False, 15)
    assert modern.ngrams == []
    assert modern.tied == (modern.n_vocab > 257)


def test_the_hybrid_is_the_flagship_with_softmax_attention_in_the_third_of_four_layers():
    hybrid, flagship = model_of("flagship_hybrid_125m"), model_of("flagship_125m")
    assert abs(n_params("flagship_hybrid_125m") / n_params("softmax_125m") - 1) < 0.01
    first, second, third, fourth = hybrid.attention_pattern
    assert [first, second, fourth] == [flagship.attention] * 3
    assert third.model_dump().items() >= CONTROL_ATTENTION.items()
    different = {"attention_pattern", "n_head"}
    assert hybrid.model_dump(exclude=different) == flagship.model_dump(exclude=different)


def test_the_published_recipe_is_the_papers():
    config = decode(TrainConfig, compose("train", "experiment=pile_125m"))
    assert config.batch_tokens == 491_520
    assert config.seq_len == 1024
    assert config.max_steps * config.batch_tokens == pytest.approx(300e9, rel=0.02)
    rates = [
        config.optim.max_lr * config.schedule.factor(step, config.max_steps)
        for step in (0, config.schedule.warmup_steps - 1, config.max_steps - 1)
    ]
    assert rates == pytest.approx([6e-5, 6e-4, 6e-5])


@pytest.mark.parametrize(("name", "tokens"), [("pile_125m_2h", 8e9), ("fineweb_124m", 3.25e9)])
def test_the_recipes_of_fewer_tokens_train_the_flagship_by_muon(name, tokens):
    config = decode(TrainConfig, compose("train", f"experiment={name}"))
    assert 0.98 * tokens < config.max_steps * config.batch_tokens <= 1.001 * tokens
    assert (config.model, config.optim.name) == (model_of("flagship_125m"), "muon")
    other = decode(TrainConfig, compose("train", f"experiment={name}", "model=softmax_125m", "optim=adamw"))
    assert (other.model, other.optim.name) == (model_of("softmax_125m"), "adamw")
    factors = [config.schedule.factor(step, config.max_steps) for step in range(config.max_steps)]
    assert (max(factors), factors.index(1.0), factors[-1]) == (1.0, config.schedule.warmup_steps - 1, 0.0)
