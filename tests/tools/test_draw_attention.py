"""The pictures of attention show what the mechanisms do: their weights are those of the definitions."""

import pytest
import torch
import yaml
from printed import assert_one_line

from common.settings import CONFIGS, decode
from model.attention import ATTENTION
from model.gpt import GPT, GPTConfig
from model.position import Positions
from tools.report.attention_masks import of_mechanisms, picture, weights_and_masks, weights_of

PANELS = yaml.safe_load((CONFIGS / "draw_attention.yaml").read_text(encoding="utf-8"))["panels"]
MECHANISMS = {title: {key: value for key, value in own.items() if key != "head"} for title, own in PANELS.items()}
T = 13


def gpt_of(attention, position="none"):
    sizes = {"n_vocab": 20, "n_layer": 1, "n_head": 4, "n_embd": 32}
    parts = {"attention": attention, "block": {"name": "mlp"}, "position": {"name": position}}
    torch.manual_seed(0)
    return GPT(decode(GPTConfig, sizes | parts)).double()


@pytest.mark.parametrize(
    ("title", "position"),
    [(title, "none") for title in PANELS]
    + [(title, "rotary") for title in PANELS if not title.startswith("log_space")],
)
def test_weights_times_values_are_the_result(title, position):
    gpt = gpt_of(MECHANISMS[title], position)
    layer, x = gpt.blocks[0].attention, torch.randn(1, T, 32, dtype=torch.float64)
    _, rotation, _ = gpt.position(x)
    *_, v = layer.project(layer.features(x)[0], rotation)  # (1, H, T, D)
    is_log = layer.__class__.__name__ == "LogSpaceAttention"
    y = weights_of(layer, x, rotation) @ (v.exp() if is_log else v)[0]
    if hasattr(layer, "n_global"):  # their values are their own
        *_, v_global = layer.project(layer.qkv_global(x), rotation)
        n = layer.n_global
        y[:, :n] = (weights_of(layer, x, rotation) @ v_global[0])[:, :n]
    y = (y.log() if is_log else y).transpose(0, 1).flatten(1)  # (T, H D)
    torch.testing.assert_close(y, layer(x, Positions(rotation))[0][0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("title", PANELS)
def test_weights_stay_within_the_mask_and_add_up_to_one(title):
    ((weights, mask),) = weights_and_masks(gpt_of(MECHANISMS[title]), torch.arange(T).unsqueeze(0))
    assert weights.shape == (4, T, T)
    mask = mask.expand(4, T, T)
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).double())


def test_every_mechanism_has_a_panel():
    drawn = {own["name"] for own in PANELS.values()}
    assert drawn == {cls.model_fields["name"].annotation.__args__[0] for cls in ATTENTION}
    words, panels = of_mechanisms("a b a", PANELS)
    assert words == ["a", "b", "a"]
    assert panels.keys() == PANELS.keys()


def test_a_dollar_sign_begins_no_formula():
    assert picture(["$", "\\frac", "$"], {"$\\frac$": (torch.eye(3), torch.ones(3, 3).bool())}).startswith(b"\x89PNG")


def test_it_draws_mechanisms_and_a_trained_model(command, run_of, tmp_path, restored_torch):
    result = command("scripts/draw_attention", "text=a cat saw a dog", f"out={tmp_path / 'all.png'}")
    assert result.status == 0, result.err
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    options = [f"checkpoint={run_of({'max_steps': 2})}", "text=a b\n", f"out={tmp_path / 'run.png'}"]
    result = command("scripts/draw_attention", *options, "head=2")
    assert result.status == 0, result.err
    assert "1 panel written to" in result.out
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    for wrong, message in ("head=3", "give 1 to 2"), ("text=" + "x" * 65, "give 1 to 64"):
        assert_one_line(command("scripts/draw_attention", *options, wrong), message)
