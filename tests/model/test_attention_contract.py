"""Properties of every attention mechanism in the registry: a new one is covered as soon as it is registered.

A mechanism has settings of its own (OWN), optional parts that others have too (PARTS), and each test adds factors such
as the length of the text. Not their full product is tried but every pair: every mechanism with every part and every
factor, every part with every other and with every factor, and so on.
"""

import functools
import itertools
import random
import typing

import pytest
import torch
from gradients import naive
from pydantic import TypeAdapter
from texts import drawn_without_engine

from common.console import say_once
from common.settings import UserError, decode, variant_names
from inference.sampling import SamplingConfig
from model.attention import ATTENTION, AttentionConfig
from model.attention.base import AttentionSettings
from model.config import GPTConfig
from model.gpt import GPT, GPTState
from model.position import Positions, RotaryPosition
from model.state_trees import cat_states, name_tensors, restore_state, select_rows, state_bytes

N_EMBD, N_HEAD, HEAD_DIM = 24, 4, 6
OWN = {  # settings with which short texts meet what sets a mechanism apart; all others: its defaults
    "log_space": [{}, {"d_key": 4, "d_val": 5}, {"product": True}],
    "log_space_signed": [{}, {"d_key": 4, "d_val": 5}, {"product": True}],
    "projection": [{"values": v, "learned": learned} for v in ("keys", "own") for learned in (False, True)],
    "sliding_window": [{"window": 1}, {"window": 5}, {"window": [3, 5, 7, 70], "dilation": [None, 1, 3, None]}],
    "longformer": [{"window": 5, "n_global": 3}, {"window": 2, "n_global": 50}],
    "strided": [{"stride": 6, "merge": merge} for merge in (False, True)],
    "fixed": [{"size": 6, "width": 2, "merge": merge} for merge in (False, True)],
}
PARTS = [*AttentionSettings.model_fields, "decay", "n_kv_head"]
CONSTANT = {"linear", "log_space", "log_space_signed", "longformer", "sliding_window"}
"""Mechanisms whose state has the same size after any number of tokens."""


def choices_of(cls):
    """The values of the parts that a mechanism can have."""
    parts = {}
    for part in (part for part in PARTS if part in cls.model_fields):
        annotation = cls.model_fields[part].annotation
        several = {bool: (False, True), int | None: (None, 2, 1)}
        parts[part] = several.get(annotation) or typing.get_args(annotation)
    return parts


def space_of(cls, factors):
    """All values of everything that can vary for a mechanism."""
    name = variant_names(cls)[0]
    own = [(name, i) for i in range(len(OWN.get(name, [{}])))]
    if not cls.traits.rotary:
        allowed = {"rotary": [False], "position": [name for name in factors.get("position", ()) if name != "rotary"]}
        factors = {key: allowed.get(key, several) for key, several in factors.items()}
    return {"name": [name], "own": own, **choices_of(cls), **factors}


def pairs_in(space):
    """All pairs of values in a space.

    A mechanism's own settings are paired with factors alone, and not with positions, which act on all alike.
    """
    yield from ((("own", own),) for own in space["own"])
    for a, b in itertools.combinations(space, 2):
        if a != "own" or b not in [*PARTS, "position"]:
            yield from (((a, x), (b, y)) for x, y in itertools.product(space[a], space[b]))


def covering(factors, keep=lambda own: True):
    """Rows that contain all pairs: each is the best of some random ones that have a pair that is still missing."""
    rng, rows = random.Random(0), []
    spaces = [space_of(cls, factors) for cls in ATTENTION]
    spaces = [{**space, "own": own} for space in spaces if (own := [x for x in space["own"] if keep(settings_of(x))])]
    missing = dict.fromkeys(pair for space in spaces for pair in pairs_in(space))

    def pairs_of(row):
        return pairs_in({key: [value] for key, value in row.items()})

    while missing:
        wanted = dict(next(iter(missing)))
        fitting = [space for space in spaces if all(value in space.get(key, ()) for key, value in wanted.items())]
        drawn = [{k: rng.choice(v) for k, v in rng.choice(fitting).items()} | wanted for _ in range(30)]
        rows.append(max(drawn, key=lambda row: sum(pair in missing for pair in pairs_of(row))))
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def settings_of(own):
    name, i = own
    return {"name": name, **OWN.get(name, [{}])[i]}


def case_of(row):
    return settings_of(row["own"]) | {part: row[part] for part in PARTS if part in row}


def id_of(case):
    return "-".join(str(value).replace(" ", "") for value in case.values() if value not in (None, False, 0, "none"))


def text_of(value):
    if isinstance(value, tuple):
        return f"{len(value)}_pieces"
    return getattr(value, "__name__", str(value).replace(" ", ""))


def on_pairs(keep=lambda own: True, **factors):
    """Parametrizes a test with `case` and these factors."""
    rows = [(case_of(row), *(row[factor] for factor in factors)) for row in covering(factors, keep)]
    ids = ["-".join([id_of(case), *map(text_of, values)]) for case, *values in rows]
    return pytest.mark.parametrize(("case", *factors), rows, ids=ids)


ROTARY = [False, True]
MODES = [torch.enable_grad, torch.inference_mode]
LENGTHS = [1, 2, 31, 64, 100]
PIECES = [(1,) * 70, (17, 1, 1, 33, 18), (65, 5), (70,)]
POSITIONS = ["log_recurrence", "learned", "rotary", "none"]


def build(case):
    torch.manual_seed(0)
    config = TypeAdapter(AttentionConfig).validate_python(case)
    module = config.build(N_EMBD, N_HEAD, HEAD_DIM).to(text(1))
    with torch.no_grad():  # parameters that begin equal must not be interchangeable
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def text(T, B=2, seed=1):
    return torch.randn(B, T, N_EMBD, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation_of(x, rotary, before=None):
    """A rotation for tokens x after so many in each row."""
    return RotaryPosition(HEAD_DIM, 100.0)(x, before and torch.tensor(before))[1] if rotary else None


def positions_of(x, rotary, before=None):
    return Positions(rotation_of(x, rotary, before))


def read(module, case, x, pieces, rotary, state=None, before=0):
    """Outputs and state of a text that comes in pieces."""
    outputs = []
    for piece in x.split(pieces if isinstance(pieces, int) else list(pieces), dim=1):
        B, T, _ = piece.shape
        before = (before,) * B if isinstance(before, int) else before
        y, state = module(piece, positions_of(piece, rotary, before), state, return_state=True)
        outputs.append(y)
        before = tuple(n + T for n in before)
    return torch.cat(outputs, dim=1), state


# Outputs and gradients below are sums of up to 100 x 100 products of numbers of order 1, by which float64 may be off by
# some 100 x 2^-53 = 1e-14 of their size, which is up to 1e3.
close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def close_with_gradients(found, wanted, leaves, tolerance=1e-11):
    close(found, wanted)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pairs = (torch.autograd.grad(y, leaves, g, allow_unused=True, materialize_grads=True) for y in (found, wanted))
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@on_pairs(T=LENGTHS, rotary=ROTARY)
def test_outputs_and_gradients_are_the_definitions(case, T, rotary):
    module = build(case)
    x = text(T).requires_grad_()
    leaves = [x, *module.parameters()]
    y = module(x, positions_of(x, rotary))[0]
    wanted = naive(module, x, rotation_of(x, rotary))
    assert y.shape == (2, T, module.n_out)
    close_with_gradients(y, wanted, leaves)


@on_pairs()
def test_zeros_are_numbers_like_others(case):
    """Without biases, a token of zeros has queries, keys and values of exactly 0, with infinite logarithms."""
    module = build(case)
    x = text(20)
    x[:, [0, 7, 8]] = 0
    x.requires_grad_()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    leaves = [x, *module.parameters()]
    amplified = 1e3 if case["qk_norm"] else 1  # its derivative at 0 is 1 / sqrt(1e-6)
    close_with_gradients(module(x)[0], naive(module, x), leaves, 1e-11 * amplified)


@pytest.mark.parametrize("case", {row["name"]: case_of(row) for row in covering({})}.values(), ids=id_of)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # where the graph has a break
@pytest.mark.slow
def test_a_compiled_module_is_the_same(case):
    module, x = build(case), text(70).requires_grad_()
    leaves = [x, *module.parameters()]
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")
    found, wanted = ([y, *torch.autograd.grad(y.square().sum(), leaves)] for y in (compiled(x)[0], module(x)[0]))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)


@on_pairs(rotary=ROTARY)
def test_later_tokens_do_not_change_earlier_outputs(case, rotary):
    module, x, changed = build(case), text(70), text(70)
    changed[:, 40:] += 1
    before, after = (module(x, positions_of(x, rotary))[0] for x in (x, changed))
    close(before[:, :40], after[:, :40], atol=1e-13, rtol=0)
    assert not torch.allclose(before[:, 40], after[:, 40])


@pytest.mark.gpu
@on_pairs(pieces=PIECES, rotary=ROTARY, mode=MODES)
def test_a_text_in_pieces_is_the_whole(case, pieces, rotary, mode):
    module, x = build(case), text(70)
    with mode():
        close(read(module, case, x, pieces, rotary)[0], module(x, positions_of(x, rotary))[0])


@on_pairs(rotary=ROTARY)
def test_gradients_through_a_state_are_those_of_the_whole(case, rotary):
    module, x = build(case), text(30).requires_grad_()
    whole = module(x, positions_of(x, rotary))[0]
    close_with_gradients(read(module, case, x, [9, 1, 1, 12, 7], rotary)[0], whole, [x, *module.parameters()])


@on_pairs(rotary=ROTARY, mode=MODES)
def test_texts_of_different_lengths_in_a_batch_are_as_each_alone(case, rotary, mode):
    module, lengths = build(case), (3, 40, 1, 12)
    texts = [text(n + 20, B=1, seed=n) for n in lengths]
    with mode():
        alone = [module(x, positions_of(x, rotary))[0] for x in texts]
        states = [read(module, case, x[:, :-20], n, rotary)[1] for x, n in zip(texts, lengths, strict=True)]
        new = torch.cat([x[:, -20:] for x in texts])
        state, before = cat_states(states), lengths
        y, after = read(module, case, new, [1, 1, 7, 1, 10], rotary, state, before)
        for row, wanted in enumerate(alone):
            close(y[row], wanted[0, -20:])
        # and rows can be taken out again, also in the middle
        y, _ = read(module, case, new[[2, 0]], 20, rotary, select_rows(state, [2, 0]), (lengths[2], lengths[0]))
        close(y[0], alone[2][0, -20:])
        close(y[1], alone[0][0, -20:])
        assert after is not state


@on_pairs(read_before=[1, 5, 33], mode=MODES)
def test_a_state_stays_valid_after_it_was_passed_on(case, read_before, mode):
    module = build(case)
    with mode():
        _, state = read(module, case, text(read_before), read_before, False)
        texts = [text(T, seed=seed) for seed, T in enumerate([1, 6, 1, 30])]
        first, again = ([read(module, case, x, 1 + x.shape[1] // 7, False, state)[0] for x in texts] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        for y, x in zip(first, texts, strict=True):
            close(y, module(torch.cat([text(read_before), x], dim=1))[0][:, read_before:])


@on_pairs()
def test_a_state_is_as_small_as_it_is_said_to_be(case):
    """Constant, or linear in the tokens; if a text comes in pieces, up to 64 tokens may not be dropped yet."""
    module = build(case)
    with torch.inference_mode():
        sizes = {n: state_bytes(read(module, case, text(n), n, False)[1]) for n in (1, 2, 100, 400)}
        in_pieces = state_bytes(read(module, case, text(400), 23, False)[1])
    if case["name"] in CONSTANT:
        assert sizes[100] == sizes[400]
    else:
        assert sizes[400] <= 4.01 * sizes[100]
    token = sizes[2] - sizes[1]
    assert sizes[400] <= in_pieces <= sizes[400] + 64 * token


@pytest.mark.gpu
@on_pairs(lambda case: True)
def test_bfloat16_errs_no_more_than_its_inputs_warrant(case, device):
    """Autocast rounds x, the weights, and their products: each to 2^-9 of its size.

    The mechanism's own definition gives the effect: the change of its outputs in float64 when x and the weights are
    rounded like this. q, k, v and the attention weights are rounded too, with a similar effect. So the tolerance is
    four times the change, plus 2^-8 of the largest output.
    """
    module, x = build(case), text(100)
    with torch.no_grad():
        wanted = naive(module, x)
        rounded = build(case)
        for p in rounded.parameters():
            p.copy_(p.bfloat16())
        change = (naive(rounded, x.bfloat16().double()) - wanted).abs().max()
        with torch.autocast(device.type, torch.bfloat16):
            y = module.float()(x.float())[0]
    assert y.isfinite().all()
    assert (y.double() - wanted).abs().max() <= 4 * change + 2**-8 * wanted.abs().max()


def gpt_config(**changes):
    sizes = {"n_vocab": 11, "n_layer": 3, "n_head": N_HEAD, "n_embd": N_EMBD}
    parts = {"attention": {"name": "softmax"}, "block": {"name": "glu"}, "position": {"name": "log_recurrence"}}
    return decode(GPTConfig, {**sizes, **parts, **changes})


def gpt_of(**changes):
    torch.manual_seed(0)
    return GPT(gpt_config(**{"n_layer": 1} | changes)).to(text(1))


def ids(T, B=1, seed=1):
    return torch.randint(11, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.gpu
@on_pairs(position=POSITIONS)
def test_prompts_of_different_lengths_are_continued_as_each_alone(case, position):
    gpt = gpt_of(attention=case, position={"name": position})
    prompts = [ids(n, seed=n)[0] for n in (5, 1, 30)]
    steps = 6

    def greedy(prompts):
        return drawn_without_engine(gpt, prompts, steps, 11, SamplingConfig(temperature=0))

    together = greedy(prompts)
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row : row + 1], greedy(prompt.unsqueeze(0)))
    # the logits too, which the tokens show only in part
    with torch.inference_mode():
        state = cat_states([gpt(prompt.unsqueeze(0), return_state=True)[1] for prompt in prompts])
        logits, _ = gpt(together, state, return_state=True)
        for row, prompt in enumerate(prompts):
            whole = gpt(torch.cat([prompt, together[row]]).unsqueeze(0))
            close(logits[row], whole[0, -steps:])


EOT = 10
RAGGED = [[5, 1, 2, 33, 17, 1, 30, 11], [64, 16, 20], [1, 99], [100]]
"""Lengths of documents in a row of 100 tokens; the first is the end of a longer one."""


def with_documents(case, position, eot_id=EOT):
    """Return a model in which no part is still the identity; the weights do not depend on eot_id."""
    gpt = GPT(gpt_config(attention=case, position={"name": position}, n_layer=1), eot_id).to(text(1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return gpt


def packed(lengths, seed=0):
    """Token ids (1, T + 1): every document but the first begins with EOT, and so does the one after the last."""
    row = torch.randint(EOT, (sum(lengths) + 1,), generator=torch.Generator().manual_seed(seed))
    row[list(itertools.accumulate(lengths))] = EOT
    return row.unsqueeze(0)


def keeps_documents_apart(case):
    return case["name"] != "longformer"


on_documents = on_pairs(keeps_documents_apart, position=POSITIONS)


@pytest.mark.gpu
@on_documents
def test_a_document_has_the_losses_and_gradients_that_it_has_alone(case, position):
    gpt, alone = with_documents(case, position), with_documents(case, position, eot_id=None)
    ids = torch.cat([packed(lengths, seed) for seed, lengths in enumerate(RAGGED)])
    found = gpt.token_losses(ids[:, :-1], ids[:, 1:])
    wanted = []
    for row, lengths in zip(ids.split(1), RAGGED, strict=True):
        documents = zip(row[:, :-1].split(lengths, dim=1), row[:, 1:].split(lengths, dim=1), strict=True)
        wanted.append(torch.cat([alone.token_losses(*document) for document in documents], dim=1))
    wanted = torch.cat(wanted)
    close(found, wanted)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pairs = (torch.autograd.grad(y, model.parameters(), g) for y, model in ((found, gpt), (wanted, alone)))
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs)


def is_carried(case):
    return case["name"] in CONSTANT - {"longformer"}


@on_pairs(is_carried, position=["log_recurrence", "rotary", "none"])
def test_a_text_goes_on_from_the_state_before_its_first_token(case, position):
    """It has its size from the beginning, and means the same as None."""
    gpt, text = gpt_of(attention=case, position={"name": position}, block={"name": "mlp", "conv": 4}), ids(70, B=2)
    with torch.no_grad():
        wanted, (first, *layers) = gpt(text), [x.initial_state(2, gpt.device) for x in (gpt.position, *gpt.blocks)]
        state = GPTState(first, tuple(layers))
        gpt.config.check_constant_state("carried state", from_empty=True)
        for piece in text.split([20, 1, 49], dim=1):
            shapes = {name: (x.shape, x.dtype) for name, x in name_tensors(state).items()}
            logits, state = gpt(piece, state, return_state=True)
            assert {name: (x.shape, x.dtype) for name, x in name_tensors(state).items()} == shapes
    close(logits, wanted[:, 21:])
    other = restore_state(state, {name: x.clone() for name, x in name_tensors(state).items()})
    close(gpt(text, other), gpt(text, state))


@on_documents
def test_a_packed_text_in_pieces_is_the_whole(case, position):
    gpt = with_documents(case, position)
    ids = torch.cat([packed(lengths, seed) for seed, lengths in enumerate(RAGGED)])[:, :-1]
    wanted = gpt.features(ids)[0]
    for pieces in ([40, 1, 1, 22, 36], [100]):
        state, outputs = None, []
        for piece in ids.split(pieces, dim=1):
            x, state = gpt.features(piece, state, return_state=True)
            outputs.append(x)
        close(torch.cat(outputs, dim=1), wanted)


@on_pairs()
@torch.no_grad()
def test_a_module_with_a_state_keeps_documents_apart_or_refuses(case):
    module, x = build(case), text(20)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 12] = True
    _, state = module(x[:, :5], return_state=True)
    if module.restarts:
        y, _ = module(x[:, 5:], Positions(document_starts=starts[:, 5:]), state)
        close(y[:, :7], module(x[:, :12])[0][:, 5:])
        close(y[:, 7:], module(x[:, 12:])[0])
        return
    assert not is_carried(case)
    with pytest.raises(ValueError, match="pass each document by itself"):
        module(x[:, 5:], Positions(document_starts=starts[:, 5:]), state)
    with pytest.raises(ValueError, match="pass each document by itself"):
        module(x, Positions(document_starts=starts), return_state=True)


@pytest.mark.gpu
def test_a_model_of_every_mechanism_streams():
    pattern = [settings_of((variant_names(cls)[0], 0)) for cls in ATTENTION]
    gpt = gpt_of(attention_pattern=pattern, n_layer=len(pattern) + 2)
    whole = gpt(ids(40, B=2))
    state, parts = None, []
    for piece in ids(40, B=2).split([1, 20, 1, 18], dim=1):
        logits, state = gpt(piece, state, return_state=True)
        parts.append(logits)
    close(torch.cat(parts, dim=1), whole)


def test_a_name_in_a_pattern_is_the_models_own_attention_or_the_defaults():
    config = gpt_config(attention={"name": "softmax", "n_kv_head": 2}, attention_pattern=["log_space", "softmax"])
    assert [layer.name for layer in config.layers] == ["log_space", "softmax", "log_space"]
    assert config.layers[1] == config.attention
    assert decode(GPTConfig, config.model_dump(mode="json")) == config  # as checkpoints keep it
    assert gpt_config().layers == [gpt_config().attention] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention": {"name": "softmax", "n_kv_head": 3}},
            "n_kv_head=3 does not divide n_head=4: use one of 1, 2, 4",
        ),
        (
            {"attention": {"name": "log_space", "product": True, "d_key": 7}},
            "attention: d_key=7 is odd: product=true needs an even number",
        ),
        ({"attention_pattern": ["softmax"] * 4}, "attention_pattern has 4 items for n_layer=3: use at most one"),
        (
            {"attention_pattern": ["softmax", "log_space"], "position": {"name": "rotary"}},
            "pattern.1: rotary positions do not help log_space: use position log_recurrence, learned or none",
        ),
        (
            {"attention_pattern": ["softmax", {"name": "fixed", "size": 6, "width": 7}]},
            "config attention_pattern.1: width=7 is more than an interval has: use 1 to size=6",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message):
        gpt_config(**change)


def test_the_kernel_of_softmax_attention_is_said(capsys):
    say_once.cache_clear()
    build({"name": "softmax"})(text(3))
    assert "softmax attention by torch's flash kernel" in capsys.readouterr().out
