"""Decoding by CUDA graphs is decoding by the model, while texts come and go.

On the CPU a function stands in for a graph: as a graph, it runs again what was recorded, on the same tensors.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from common.console import say_once
from common.settings import decode
from model import graphs
from model.config import GPTConfig
from model.gpt import GPT
from model.graphs import DecodingStep
from model.state_trees import cat_states, select_rows

ONE_SIZE = [
    ({"name": "log_space", "decay": "head"}, {"name": "mlp", "conv": 4}, "none"),
    ({"name": "log_space"}, {"name": "glu"}, "log_recurrence"),
    ({"name": "log_space_signed"}, {"name": "mlp"}, "none"),
    ({"name": "linear", "decay": "head"}, {"name": "mlp"}, "rotary"),
]
each_model = pytest.mark.parametrize(("attention", "block", "position"), ONE_SIZE, ids=str)


def config_of(attention, block=None, position="none", n_head=2, n_embd=16):
    raw = {"n_vocab": 50, "n_layer": 2, "n_head": n_head, "n_embd": n_embd, "attention": attention}
    raw |= {"ngrams": [1, 2]} if position == "none" else {}
    return decode(GPTConfig, raw | {"block": block or {"name": "mlp"}, "position": {"name": position}})


def make_gpt(*parts, eot_id=None):
    """A model without parameters that are 0, so that all of them have an effect."""
    torch.manual_seed(0)
    gpt = GPT(config_of(*parts), eot_id).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            p += 0.02 * torch.randn_like(p)
    return gpt


@pytest.fixture
def recorded(monkeypatch):
    """The rows of each graph that is recorded. Recording runs the step, and so does each replay, on the same memory."""
    rows = []

    def record(step):
        result = step().clone()
        rows.append(len(result))
        return lambda: result.copy_(step()), result

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "use_graphs", lambda gpt, state: True)
    return rows


def equal(found, expected):
    """Whether all tensors of two states, or of tuples of these, are equal in every bit."""
    return all(x is y or torch.equal(x, y) for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True))


def read(gpt, rows, seed):
    """The state of some texts, as an engine joins them: the order of sums depends on strides too."""
    ids = torch.randint(5, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return cat_states([gpt(ids, return_state=True)[1]])


COME_AND_GO = [None, None, [3, 1], None, [1, 0], [0], 1, 1, 1, 2, None, [4, 2, 0], [2, 1, 0], 2]
"""Before each token, which of the texts stay, in which order, or how many come."""


@each_model
@torch.inference_mode()
def test_steps_have_the_bits_of_the_model_while_texts_come_and_go(recorded, attention, block, position):
    """Of the model with as many rows as the graph, because the order of a product's sums depends on their number."""
    gpt = make_gpt(attention, block, position)
    step = DecodingStep(gpt, max_rows=6)
    found = expected = read(gpt, 4, 0)
    n = 4
    for token, change in enumerate(COME_AND_GO):
        if isinstance(change, int):
            n += change
            found, expected = (cat_states([state, read(gpt, change, token)]) for state in (found, expected))
        elif change is not None:
            n = len(change)
            found, expected = (select_rows(state, change) for state in (found, expected))
        ids, unused = torch.randint(5, (n, 1)), {1: 0, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0}[n]
        rows = [*range(n), *[0] * unused]
        logits, found = step(ids, found)
        own, expected = gpt(ids[rows], select_rows(expected, rows), return_state=True)
        expected = select_rows(expected, range(n))
        assert equal((logits, found), (own[:n], expected))
    assert recorded == [4, 2, 1, 6]


@torch.inference_mode()
def test_a_state_from_elsewhere_is_not_changed_and_may_return(recorded):
    """Two batches take turns with one graph, as they would if a state were continued twice."""
    gpt = make_gpt({"name": "log_space"})
    step = DecodingStep(gpt, max_rows=2)
    ids, first, second = torch.tensor([[1], [2]]), read(gpt, 2, 0), read(gpt, 2, 1)
    before = select_rows(first, [0, 1])
    for state in (first, second, first):
        logits, after = step(ids, state)
        assert equal((logits, after), gpt(ids, state, return_state=True))
    assert equal(first, before)
    assert recorded == [2]


@pytest.mark.parametrize(
    ("attention", "position"), [("softmax", "none"), ("sliding_window", "none"), ("log_space", "learned")]
)
def test_other_models_are_called_and_one_line_says_why(monkeypatch, capsys, attention, position):
    gpt = make_gpt({"name": attention}, None, position)
    state = read(gpt, 2, 0)
    capsys.readouterr()
    say_once.cache_clear()
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"))
    for _ in range(2):
        assert not graphs.use_graphs(on_gpu, state)
    why = "the model's state grows with the text, or counts its tokens"
    assert capsys.readouterr().out == f"decoding without CUDA graphs, which is slower: {why}\n"


@pytest.mark.parametrize("fault", ["stale", "last place", "twice"])
@torch.inference_mode()
def test_a_graph_that_differs_from_its_step_is_not_used(recorded, monkeypatch, capsys, fault):
    """It does nothing, gives another last bit, or reads the token once more after the right logits."""

    def record(step):
        result = step().clone()

        def replay():
            if fault != "stale":
                result.copy_(step())
            if fault == "last place":
                result[0, 0, 0] *= 1 + 2**-23
            if fault == "twice":
                step()

        return replay, result

    monkeypatch.setattr(graphs, "record", record)
    say_once.cache_clear()
    gpt = make_gpt({"name": "log_space"})
    state, ids = read(gpt, 2, 0), torch.tensor([[1], [2]])
    step = DecodingStep(gpt, max_rows=4)
    for _ in range(2):
        assert equal(step(ids, state), gpt(ids, state, return_state=True))
    assert capsys.readouterr().out.count("a replayed graph differs from the step that it replaces") == 1


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["log_space", "linear"])
@torch.inference_mode()
def test_a_gpu_replays_the_bits_of_the_model(device, attention, dtype):
    gpt = make_gpt({"name": attention}).to(device, dtype)
    step = DecodingStep(gpt, max_rows=4)
    state = read(gpt, 4, 0)
    for token in range(4):
        ids = torch.randint(5, (4, 1))
        expected = gpt(ids, state, return_state=True)
        logits, state = step(ids, state)
        assert equal((logits, state), expected), token
    assert step._usable
