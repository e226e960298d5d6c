"""scripts/convert_gqa.py: fewer key and value heads, each the mean of a group's, and training goes on."""

import shlex

import pytest
import torch
from alone import open_run

from common.settings import UserError, decode, variant_names
from model.attention import ATTENTION
from model.gpt import GPT, GPTConfig
from runtime.checkpoint import load_model, open_checkpoint
from tools.convert.gqa import convert, shared, with_n_kv_head
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

NAMES = [variant_names(config)[0] for config in ATTENTION if "n_kv_head" in config.model_fields]
HEADS, DIM = 6, 4
OF_A_RUN = {"model.n_head": 4, "model.attention": {"name": NAMES[0]}, "model.position": {"name": "rotary"}}
OF_A_RUN |= {"data.document_reset": True}


def gpt_of(attention, n_kv_head=None, dtype=torch.float64, conv=0, **changes):
    sizes = {"n_vocab": 11, "n_layer": 2, "n_head": HEADS, "n_embd": HEADS * DIM}
    parts = {"block": {"name": "glu"}, "position": {"name": "rotary"}}
    raw = sizes | parts | {"attention": {"name": attention, "n_kv_head": n_kv_head, "conv": conv}}
    torch.manual_seed(0)
    return GPT(decode(GPTConfig, raw | changes)).to(dtype)


def unshared(fewer, n_kv_head, wanted):
    """A model in which each of `fewer`'s key and value heads stands several times, as `wanted` has room for."""
    tensors = {}
    for name, value in fewer.state_dict().items():
        width = 4 if name.endswith(".conv") else 1  # weights of a feature
        rows = len(wanted.state_dict()[name]) // width
        value = value.unflatten(0, (width, -1)).transpose(0, 1)
        if rows != len(value):
            kinds = (rows - len(value)) // ((HEADS - n_kv_head) * DIM)
            own = len(value) - kinds * n_kv_head * DIM
            parts = [value[:own]]
            for heads in value[own:].split(n_kv_head * DIM):
                parts += [head for head in heads.split(DIM) for _ in range(HEADS // n_kv_head)]
            value = torch.cat(parts)
        tensors[name] = value.transpose(0, 1).flatten(0, 1)
    wanted.load_state_dict(tensors)
    return wanted


@pytest.mark.parametrize(
    ("name", "conv", "n_kv_head"), [*((name, 0, 1 + i % 3) for i, name in enumerate(NAMES)), (NAMES[0], 4, 2)]
)
def test_equal_heads_give_the_same_model(name, conv, n_kv_head):
    dtype = torch.float64
    fewer = gpt_of(name, n_kv_head, dtype, conv)
    with torch.no_grad():
        for key, value in fewer.named_parameters():
            if key.endswith(".conv"):
                value.add_(0.1 * torch.randn_like(value))
    before = unshared(fewer, n_kv_head, gpt_of(name, dtype=dtype, conv=conv))
    after = shared(before, n_kv_head)
    for key, value in fewer.state_dict().items():
        assert torch.equal(after.state_dict()[key], value), key
    token_ids = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(1))
    # The same products, in an order that the kernels choose: some tens of roundings of logits of size about 1.
    torch.testing.assert_close(after(token_ids), before(token_ids), rtol=0, atol=100 * torch.finfo(dtype).eps)


def test_every_layer_of_a_pattern_that_can_share_does():
    own, other = NAMES[:2]
    pattern = [own, "log_space", other, {"name": other, "n_kv_head": 3}]
    before = gpt_of(own, n_layer=4, attention_pattern=pattern, position={"name": "none"})
    after = shared(before, 3)
    assert [getattr(block.attention, "n_kv_head", None) for block in after.blocks] == [3, None, 3, 3]
    for layer in (1, 3):
        old, new = before.blocks[layer].state_dict(), after.blocks[layer].state_dict()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert after(torch.zeros(1, 9, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize(
    ("attention", "heads", "message"),
    [
        (NAMES[0], 4, rf"n_kv_head=4 does not divide the 6 key and value heads of {NAMES[0]}: use one of 1, 2, 3, 6"),
        (NAMES[0], 6, r"n_kv_head=6 changes no layer"),
        ("linear", 2, r"n_kv_head=2 changes no layer's key and value heads"),
    ],
)
def test_what_cannot_be_shared_is_refused(attention, heads, message):
    raw = gpt_of(NAMES[0]).config.model_dump() | {"attention": {"name": attention}}
    with pytest.raises(UserError, match=message):
        with_n_kv_head(decode(GPTConfig, raw), heads)


def test_a_run_begins_with_the_converted_weights(tiny, run_of, tmp_path):
    run_of(OF_A_RUN)
    path = convert(tmp_path / "run", tmp_path / "gqa", 2)
    assert path == tmp_path / "gqa" / "checkpoints" / "step-00000000"
    checkpoint, first = open_checkpoint(path).state, open_checkpoint(tmp_path / "run").state
    assert (checkpoint.step, checkpoint.best_val_loss) == (0, None)
    assert checkpoint.run_id != first.run_id
    wanted = shared(load_model(tmp_path / "run")[0], 2).state_dict()
    gpt, tokenizer = load_model(path)
    assert gpt.eot_id == tokenizer.eot_id  # it keeps documents apart, as before
    assert all(torch.equal(value, wanted[key]) for key, value in gpt.state_dict().items())

    shares = {"model.attention": {"name": NAMES[0], "n_kv_head": 2}}
    config = tiny(OF_A_RUN | shares | {"init_from": tmp_path / "gqa", "run_dir": tmp_path / "gqa-trained"})
    begun = open_run(config).gpt.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in begun.items())
    fit(config)
    after, _ = load_model(tmp_path / "gqa-trained")
    assert any(not torch.equal(value, wanted[key]) for key, value in after.state_dict().items())


@pytest.mark.parametrize(
    ("options", "heads", "wanted"),
    [
        ([], 2, [2]),
        (["model.n_layer=2", f"model.attention_pattern=[{NAMES[0]},{{name:{NAMES[1]},n_kv_head:2}}]"], 1, [1, 1]),
    ],
)
def test_the_settings_to_go_on_with_are_printed(tiny_args, tmp_path, command, options, heads, wanted):
    first = [*tiny_args, "model.n_head=4", f"model/attention={NAMES[0]}", "model/position=rotary", *options]
    assert command("train", *first, "stop_at=2").status == 0
    run_dir = tmp_path / "it's shared (1)"
    asked = f"checkpoint={tmp_path / 'run'}", f"run_dir={run_dir}", f"n_kv_head={heads}"
    result = command("scripts/convert_gqa", *asked)
    assert result.status == 0, result.err
    settings = shlex.split(result.out.partition("the settings of the first run except for its model, and ")[2])
    result = command("train", *(given for given in first if "model" not in given), *settings, "stop_at=1")
    assert result.status == 0, result.err
    state = open_checkpoint(tmp_path / f"{run_dir.name}-trained").state
    assert (state.step, [layer.n_kv_head for layer in state.model.layers]) == (1, wanted)
