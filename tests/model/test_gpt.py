"""The model: attention, block and position in all pairs; weights; sizes."""

import itertools
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from common.settings import variant_names
from model.attention import ATTENTION
from model.config import BlockConfig, GPTConfig
from model.gpt import GPT
from model.position import PositionConfig

BLOCKS, POSITIONS = (get_args(get_args(part)[0]) for part in (BlockConfig, PositionConfig))
CHOICES = [  # all pairs of two parts
    {
        "attention": variant_names(a)[0],
        "block": variant_names(BLOCKS[(i + j) % len(BLOCKS)])[0],
        "position": variant_names(p)[0],
    }
    for (i, a), (j, p) in itertools.product(enumerate(ATTENTION), enumerate(POSITIONS))
    if a.traits.rotary or "rotary" not in variant_names(p)
]
IDS = ["-".join(choice.values()) for choice in CHOICES]
PUBLISHED = {"attention": "log_space", "block": "glu", "position": "log_recurrence"}


def tiny(choice=PUBLISHED, **sizes):
    parts = {key: {"name": name} for key, name in choice.items()}
    return GPTConfig(**{"n_vocab": 11, "n_layer": 2, "n_head": 3, "n_embd": 12, **parts, **sizes})


def build(config, dtype=torch.float64):
    torch.manual_seed(0)
    return GPT(config).to(dtype)


def ids(T, B=2, n_vocab=11):
    return torch.randint(n_vocab, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
def test_every_parameter_gets_a_gradient(choice):
    gpt = build(tiny(choice))
    gpt.loss(ids(33)[:, :-1], ids(33)[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in gpt.parameters())


@pytest.mark.parametrize("choice", CHOICES, ids=IDS)
def test_positions_but_none_tell_the_order_of_the_tokens(choice):
    """With one layer and no position, the last logits see the earlier tokens as a set."""
    gpt = build(tiny(choice, n_layer=1))
    swapped = ids(9)[:, [1, 0, *range(2, 9)]]
    same = torch.allclose(gpt(ids(9))[:, -1], gpt(swapped)[:, -1], atol=1e-9, rtol=0)
    assert same == (choice["position"] == "none")


def test_loss_is_the_mean_over_targets_that_are_not_negative():
    gpt = build(tiny())
    targets = ids(20)
    targets[0, 5:] = -1
    log_probabilities = gpt(ids(20)).log_softmax(-1)
    wanted = [-log_probabilities[b, t, targets[b, t]] for b in range(2) for t in range(20) if targets[b, t] >= 0]
    torch.testing.assert_close(gpt.loss(ids(20), targets), torch.stack(wanted).mean())
    assert (gpt.token_losses(ids(20), targets)[0, 5:] == 0).all()


@pytest.mark.parametrize(("tied", "padded"), [(True, ["embed.weight"]), (False, ["embed.weight", "output.weight"])])
def test_a_padded_vocabulary_shows_in_the_number_of_parameters_and_not_in_logits(tied, padded):
    gpt = build(tiny(n_vocab=11, pad_vocab=8, tied=tied))
    assert gpt(ids(3)).shape == (2, 3, 11)
    assert [name for name, p in gpt.named_parameters() if 16 in p.shape] == padded
    n_params, padding = gpt.n_params(), len(padded) * 5 * gpt.config.n_embd
    says = f"{n_params:,} parameters ({n_params - padding:,} without the rows that pad the vocabulary)"
    assert (gpt.size(11), gpt.size(16)) == (says, f"{n_params:,} parameters")


DRAWN = {
    "published": {},
    "mlp": {"block": {"name": "mlp", "conv": 4}, "attention": {"name": "longformer"}, "ngrams": [1, 2]},
    "learned": {"attention": {"name": "projection", "learned": True}, "position": {"name": "learned"}},
    "gates": {"attention": {"name": "linear", "gate": "silu", "decay": "head"}, "tied": False},
}


@pytest.mark.parametrize("changes", DRAWN.values(), ids=DRAWN)
def test_a_seed_gives_the_same_weights_drawn_at_once_or_later(changes):
    wanted = build(tiny(**changes), torch.float32)
    with torch.device("meta"):
        gpt = GPT(tiny(**changes))
    torch.manual_seed(0)
    gpt.to_empty(device="cpu").init_weights()
    for (name, a), b in zip(gpt.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_flops_count_the_weights_that_products_use():
    """6 operations per weight of the recurrence and of every linear layer; a table of positions does not count."""
    config = tiny({"attention": "softmax", "block": "mlp", "position": "learned"})
    linear = 11 * 12 + 2 * (12 * 36 + 12 * 12 + 2 * 12 * 48)  # embedding, and per layer qkv, proj, up and down
    assert build(config).flops_per_token(50) == 6 * linear + 3 * 2 * (2 * 3 * 50 * 4)


def test_a_sequence_beyond_the_learned_positions_is_refused():
    gpt = build(tiny(position={"name": "learned", "max_len": 8}))
    with pytest.raises(ValueError, match="9 tokens are more than the model's 8 learned positions"):
        gpt(ids(9))
    _, state = gpt(ids(8), return_state=True)
    with pytest.raises(ValueError, match="9 tokens are more"):
        gpt(ids(1), state)


def test_a_pattern_takes_the_names_of_configuration_files():
    ours, theirs = tiny(attention_pattern=["log_space_forgets", "softmax"]).layers
    assert (ours.name, ours.decay, ours.product, ours.gate) == ("log_space", "head", True, "silu")
    assert (theirs.name, theirs.decay) == ("softmax", "none")
    with pytest.raises(ValidationError, match=r"attention_pattern\.0\n.*softmax"):
        tiny(attention_pattern=["../softmax"])
