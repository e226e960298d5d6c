"""A run proves its first gradient: what is wrong is found, named and left out. Kernels run in Triton's interpreter."""

import copy
import dataclasses
import math
import re

import pytest
import ranks
import torch

import trainer.loop
from common.console import say_once
from common.settings import UserError, decode
from model.gpt import GPT, GPTConfig
from model.ops import kernels, linear_cross_entropy, log_attention
from runtime import proof
from runtime.device import Runtime
from runtime.distributed import World
from runtime.proof import Difference, Form, Proofs, compare, prove_gradients, prove_logits
from trainer.loop import fit

FLAGSHIP = {
    **{"n_vocab": 40, "n_layer": 2, "n_head": 2, "n_embd": 16, "ngrams": [1, 2], "position": {"name": "none"}},
    "attention": {"name": "log_space", "decay": "head", "gate": "silu"},
    "block": {"name": "mlp", "conv": 4},
}
HERE = Runtime(torch.device("cpu"), torch.bfloat16, proof=True)
WORLD = World(torch.device("cpu"))
OPERATORS = {"log attention", "the loss"}
COMPILE = torch.compile


@pytest.fixture(autouse=True)
def kernels_here(monkeypatch, tmp_path):
    """Kernels are chosen on the CPU, and outcomes are kept in a folder of the test."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "has_kernels", lambda device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    say_once.cache_clear()
    yield
    kernels.leave_out(())
    torch.compiler.reset()


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT(decode(GPTConfig, FLAGSHIP), eot_id=3)


@pytest.fixture
def make_wrong(monkeypatch):
    """Makes a kernel or compiled blocks wrong. Plain torch stands in for the kernel of log attention, which is slow."""
    cross_entropy = linear_cross_entropy._by_triton

    def attend(*inputs, **options):
        q, k, *others = inputs
        k = k.detach() + attend.factor * (k - k.detach())  # the gradient of k alone
        return log_attention.BACKENDS["chunked"](q, k, *others, **options)

    def crash(*given):
        raise RuntimeError("CUDA error: no kernel image\nmore")

    def off(graph, inputs):
        return lambda *given: [x * 1.3 if x.is_floating_point() else x for x in graph(*given)]

    def make(what):
        attend.factor = 1.3 if what in ("log attention", "both") else 1.0
        if what in ("the loss", "both"):
            monkeypatch.setitem(linear_cross_entropy._FORMS, "triton", lambda *given: 1.02 * cross_entropy(*given))
        if what == "an error":
            monkeypatch.setitem(linear_cross_entropy._FORMS, "triton", crash)
        backend = off if what == "a block" else "eager"
        monkeypatch.setattr(torch, "compile", lambda function: COMPILE(function, backend=backend))

    monkeypatch.setitem(log_attention.BACKENDS, "triton", attend)
    return make


def batch(n=8, T=12):
    return torch.randint(40, (2, n, T), generator=torch.Generator().manual_seed(1))


def is_compiled(gpt):
    return [block._compiled_call_impl is not None for block in gpt.blocks] == [True] * len(gpt.blocks)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
@pytest.mark.parametrize(
    ("what", "left_out", "compiled", "line"),
    [
        pytest.param(None, (), True, None, marks=pytest.mark.slow),
        pytest.param(
            "a block",
            (),
            False,
            r"^blocks\.\d\.\S+ has norm \S+, in plain torch \S+: .* without torch.compile, which",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "log attention",
            ("log attention",),
            True,
            r"qkv.weight\[1\] has norm .* without the kernels of log attention,",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "the loss",
            ("the loss",),
            True,
            r"^the loss has norm \S+, in plain torch \S+: .* the kernels of the loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "both",
            ("log attention", "the loss"),
            True,
            r" without the kernels of log attention and the kernels of the loss, which",
            marks=pytest.mark.slow,
        ),
        ("an error", ("the loss",), True, r"^CUDA error: no kernel image: .* the kernels of the loss,"),
    ],
)
def test_what_is_wrong_is_found_named_and_left_out(gpt, make_wrong, capsys, what, left_out, compiled, line):
    make_wrong(what)
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    form = prove_gradients(gpt, *batch(), HERE, WORLD, compiled=True)
    assert form == Form(compiled, left_out)
    assert (kernels.left_out, is_compiled(gpt)) == (set(left_out), compiled)
    assert all(torch.equal(p, before[name]) for name, p in gpt.named_parameters())
    assert all(p.grad is None for p in gpt.parameters())
    said = capsys.readouterr()
    agrees = r"gradients of the first 8 sequences agree with plain torch: largest difference 0\.0\d+, in \S+\n"
    assert re.search(agrees, said.out)
    warning = " ".join(said.err.split()).removeprefix("warning: ")
    assert re.search(line or "^$", warning), warning


def test_without_a_right_form_a_line_says_what_to_do():
    def difference(form):
        return Difference(1.0, "embed.weight", " has norm 2, in plain torch 3")

    with pytest.raises(
        UserError, match=r"^embed.weight has norm 2, in plain torch 3, .* runtime.proof=false to go on$"
    ):
        proof.first_right(difference, True, torch.bfloat16, WORLD)


def test_processes_that_used_different_operators_try_the_same_forms(monkeypatch):
    """An error in one process may come before it uses an operator that is wrong in another."""
    other = ["the loss"]
    monkeypatch.setattr(World, "exchange", lambda world, local: [local, other if isinstance(local, list) else local])
    forms = []

    def difference(form):
        forms.append(form)
        kernels.used.add("log attention")
        return Difference(0.0 if form == Form(False, ("the loss",)) else 1.0, "embed.weight")

    form, _ = proof.first_right(difference, True, torch.bfloat16, WORLD)
    assert form == Form(False, ("the loss",))
    left_out = [(), ("log attention",), ("the loss",)]
    assert forms == [Form(compiled, names) for names in left_out for compiled in (True, False)]


def test_a_difference_is_relative_to_what_can_cancel():
    """NaN is wrong; a gradient far below the whole is compared with the whole; the loss may have one rounding."""
    expected = {"the loss": torch.tensor(8.0), "large": torch.ones(4), "small": torch.full((4,), 1e-9)}
    scales = {"the loss": torch.tensor(8.0), "large": torch.tensor(2.0), "small": torch.tensor(2e-9)}

    def size_of(name, value):
        return compare({**expected, name: value}, expected, scales)

    assert size_of("large", torch.full((4,), 1.25))[:2] == (0.25, "large")
    assert size_of("large", torch.full((4,), math.nan))[:2] == (math.inf, "large")
    assert size_of("small", torch.full((4,), 2e-9)).size == pytest.approx(1e-3, rel=1e-3)
    assert size_of("the loss", torch.tensor(8.0625)).size == pytest.approx(16 * 2**-7)
    wide = scales | {"large": torch.tensor(20.0)}  # parts that cancel have norms of 20 together
    assert compare({**expected, "large": torch.full((4,), 1.25)}, expected, wide).size == pytest.approx(0.025)


def test_plain_gradients_are_those_of_float64(gpt):
    ids, targets = batch()
    targets[0, 3:] = -1
    expected, scales = proof.plain_gradients(gpt, ids, targets)
    exact = copy.deepcopy(gpt).double()
    loss = exact.summed_loss(ids, targets, None) / targets.numel()
    truth = torch.autograd.grad(loss, exact.embed.weight)[0]
    assert float(expected["the loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(expected["embed.weight"].double(), truth, rtol=1e-4, atol=1e-7)
    assert scales["embed.weight"] > 0.3 * truth.norm()


def test_outcomes_are_kept_for_a_model_and_options(gpt, tmp_path):
    form, options = Form(True, ("the loss",)), {"recompute": "none"}
    assert Proofs(gpt, torch.bfloat16).read(options) is None
    Proofs(gpt, torch.bfloat16).write(form, options)
    assert Proofs(gpt, torch.bfloat16).read(options) == Proofs(gpt, torch.bfloat16).read() == form
    assert Proofs(gpt, torch.bfloat16).read({"recompute": "block"}) is None
    assert Proofs(gpt, torch.float32).read() is None
    other = GPT(decode(GPTConfig, FLAGSHIP | {"n_layer": 1}))
    assert Proofs(other, torch.bfloat16).read() is None
    (path,) = (tmp_path / "cache/log_gpt/proofs").iterdir()
    path.write_text("{")
    assert Proofs(gpt, torch.bfloat16).read() is None


@pytest.mark.parametrize("autocast", [True, False])
def test_inference_compares_logits_once_and_uses_what_is_known(gpt, make_wrong, monkeypatch, autocast):
    make_wrong("nothing")
    monkeypatch.setattr(proof, "_TEXT", 40)
    gpt = gpt if autocast else gpt.bfloat16()

    def attend(*inputs, **options):
        return log_attention.BACKENDS["chunked"](*inputs, **options) + 0.5

    with torch.no_grad():
        for p in gpt.parameters():
            p += 0.05 * torch.randn_like(p)
    prove_logits(gpt, HERE, autocast)
    assert kernels.left_out == set()
    (path,) = proof.cache_folder().iterdir()
    path.unlink()
    monkeypatch.setitem(log_attention.BACKENDS, "triton", attend)
    for _ in range(2):
        prove_logits(gpt, HERE, autocast)
        assert kernels.left_out == {"log attention"}
        kernels.leave_out(())
        monkeypatch.setattr(proof, "first_right", None)  # the second time, the outcome is known


def test_a_run_proves_itself_once(tiny, make_wrong, monkeypatch, capsys):
    """A resumed run, and its evaluation, know the outcome."""
    make_wrong("nothing")
    monkeypatch.setitem(
        linear_cross_entropy._FORMS, "triton", lambda *given: 1.02 * linear_cross_entropy._by_torch(*given)
    )
    opened = trainer.loop.open_runtime
    monkeypatch.setattr(trainer.loop, "open_runtime", lambda config: dataclasses.replace(opened(config), proof=True))
    sizes = {"runtime.micro_batch": 3, "model.position": {"name": "none"}}  # of 4 sequences: steps take 2 at a time
    config = tiny({"runtime.dtype": "bfloat16"} | sizes)
    for stop_at in (2, 4):
        kernels.leave_out(())
        fit(config.model_copy(update={"stop_at": stop_at}))
        assert kernels.left_out == {"the loss"}
    said = capsys.readouterr()
    assert said.out.count("gradients of the first 2 sequences agree with plain torch") == 1
    assert said.err.count("without the kernels of the loss") == 1


PROVED = """
import dataclasses, os, sys
sys.path.insert(0, os.getcwd())
from model.ops import kernels, linear_cross_entropy as loss, log_attention
log_attention.BACKENDS["triton"] = log_attention.BACKENDS["chunked"]
log_attention._why_not_triton = lambda *_: None
kernels.has_kernels = lambda device: True
factor = 1.1 if os.environ["RANK"] == "1" else 1.0
loss._FORMS["triton"] = lambda z, targets, n, *given: factor * loss._by_torch(z[:, :n], targets, n, *given)
import trainer.loop, runpy
opened = trainer.loop.open_runtime
trainer.loop.open_runtime = lambda config: dataclasses.replace(opened(config), proof=True)
import atexit
atexit.register(lambda: print(os.environ["RANK"], "left out", sorted(kernels.left_out), file=sys.stderr))
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_processes_agree_on_what_is_left_out(tiny_args, tmp_path, strategy):
    """With ddp the second process finds the loss wrong; with fsdp the first one, which is right, decides alone."""
    args = [
        *tiny_args,
        f"run_dir={tmp_path / 'run'}",
        f"runtime.strategy={strategy}",
        "max_steps=2",
        "model/position=none",
    ]
    results = ranks.run(2, "-c", PROVED, *args, XDG_CACHE_HOME=str(tmp_path / "cache"), TRITON_INTERPRET="1")
    left_out = ["the loss"] if strategy == "ddp" else []
    for rank, result in enumerate(results):
        assert f"{rank} left out {left_out}" in result.err
    assert results[0].out.count("agree with plain torch") == 1
    assert ("without the kernels of the loss" in results[0].err) == (strategy == "ddp")
