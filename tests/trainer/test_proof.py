"""A run proves its first gradient, and goes on in plain torch if it is wrong. Plain torch stands in for kernels."""

import dataclasses
import math
import re

import pytest
import ranks
import torch

import trainer.loop
from common.console import say_once
from common.settings import UserError, decode
from model.config import GPTConfig
from model.gpt import GPT
from model.ops import kernels, linear_cross_entropy, log_attention
from runtime import proof
from runtime.device import Compute, compile_blocks, is_compiled
from runtime.distributed import World
from runtime.proof import Difference, StoredProof, compare_norms, prove_logits
from trainer.loop import fit
from trainer.start import prove_micro_batch

FLAGSHIP = {
    **{"n_vocab": 40, "n_layer": 2, "n_head": 2, "n_embd": 16, "ngrams": [1, 2], "position": {"name": "none"}},
    "attention": {"name": "log_space", "decay": "head", "gate": "silu"},
    "block": {"name": "mlp", "conv": 4},
}
SOFTMAX = FLAGSHIP | {"attention": {"name": "softmax", "decay": "head"}, "tied": False}
PUBLISHED = FLAGSHIP | {"ngrams": [], "attention": {"name": "log_space"}, "block": {"name": "glu"}}
GPT2 = FLAGSHIP | {"ngrams": [], "position": {"name": "learned", "max_len": 128}, "attention": {"name": "softmax"}}
GPT2 |= {"block": {"name": "mlp"}}
HERE = Compute(torch.device("cpu"), torch.bfloat16, proof=True)
WORLD = World(torch.device("cpu"))
COMPILE = torch.compile


@pytest.fixture(autouse=True)
def kernels_here(monkeypatch, tmp_path):
    """Kernels are chosen on the CPU, and outcomes are kept in a folder of the test."""
    monkeypatch.setattr(kernels, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "enabled", True)
    monkeypatch.setattr(log_attention, "_why_not_triton", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    say_once.cache_clear()
    yield
    torch.compiler.reset()


def model(raw=FLAGSHIP, seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(decode(GPTConfig, raw | changes), eot_id=3)


def micro_batch(n=8, T=12):
    return torch.randint(40, (2, n, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def kernel_of(monkeypatch):
    """Replaces a kernel: of log attention, or of the loss."""

    def replace(attend=None, loss=None):
        monkeypatch.setitem(log_attention.BACKENDS, "triton", attend or log_attention.BACKENDS["chunked"])
        monkeypatch.setitem(linear_cross_entropy._FORMS, "triton", loss or plain_loss)

    replace()
    return replace


def plain_loss(logits, targets, n_vocab, *others):
    return linear_cross_entropy._by_torch(logits[:, :n_vocab], targets, n_vocab, *others)


def loss_with(factor=1.0, of_gradients=1.0):
    """A kernel of the loss whose results are multiplied; of_gradients: (tokens, 1) or a number."""

    def loss(logits, targets, n_vocab, with_grad, *others):
        losses = factor * plain_loss(logits, targets, n_vocab, with_grad, *others)
        if with_grad:
            logits *= of_gradients
        return losses

    return loss


def attention_with(of_gradients):
    """A kernel of log attention: the gradient of k is multiplied by (B, H, T, d)."""

    def attend(q, k, *others, **options):
        k = k.detach() + of_gradients * (k - k.detach())
        return log_attention.BACKENDS["chunked"](q, k, *others, **options)

    return attend


def without_state(*inputs, state=None, **options):
    """A kernel of log attention that drops its state."""
    zeros = None if state is None else torch.zeros_like(state)
    return log_attention.BACKENDS["chunked"](*inputs, state=zeros, **options)


def crash(*given):
    raise RuntimeError("CUDA error: no kernel image\nmore")


@pytest.mark.parametrize(
    ("raw", "shape", "chunk"),
    [
        (FLAGSHIP, (8, 12), None),
        (FLAGSHIP, (1, 96), None),
        (FLAGSHIP, (3, 33), 16),
        (PUBLISHED, (2, 40), None),
        (SOFTMAX, (8, 12), None),
        (GPT2, (1, 96), None),
    ],
)
def test_a_right_model_is_not_refused(kernel_of, capsys, raw, shape, chunk):
    gpt = model(raw)
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    assert prove_micro_batch(gpt, *micro_batch(*shape), dataclasses.replace(HERE, sequence_chunk=chunk), WORLD)
    assert kernels.enabled
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in gpt.named_parameters())
    said = capsys.readouterr()
    agrees = (
        r"gradients of the first \d sequences? agree with plain torch: largest difference 0\.\d+ in .+, bound 0\.\d"
    )
    assert re.search(agrees, said.out)
    assert said.err == ""


ONE_HEAD = torch.tensor([1.0, 1.12]).view(1, 2, 1, 1)
ONE_SEQUENCE = torch.ones(64, 1, 1, 1).index_fill(0, torch.tensor([63]), 0)
ONE_TOKEN = torch.ones(512, 1).index_fill(0, torch.tensor([300]), 0)


@pytest.mark.parametrize(
    ("wrong", "shape", "chunk", "line"),
    [
        ({"attend": attention_with(ONE_HEAD)}, (8, 12), None, r"qkv.weight, .*: this goes on in plain torch"),
        ({"loss": loss_with(of_gradients=1.1)}, (8, 12), None, "weight"),
        ({"loss": loss_with(1.005)}, (8, 12), None, "the loss"),
        ({"loss": loss_with(of_gradients=ONE_TOKEN)}, (8, 64), None, "the embedding of a token"),
        ({"attend": attention_with(ONE_SEQUENCE)}, (64, 6), None, r"qkv.weight"),
        ({"attend": without_state}, (4, 32), 8, ""),
        ({"loss": crash}, (8, 12), None, "^CUDA error: no kernel image: this goes on"),
    ],
    ids=["a head", "all gradients", "the loss", "a token", "the last sequence", "no state", "an error"],
)
def test_a_wrong_kernel_is_found_and_named_and_plain_torch_goes_on(kernel_of, capsys, wrong, shape, chunk, line):
    kernel_of(**wrong)
    assert not prove_micro_batch(model(), *micro_batch(*shape), dataclasses.replace(HERE, sequence_chunk=chunk), WORLD)
    assert not kernels.enabled
    said = capsys.readouterr()
    warning = " ".join(said.err.split()).removeprefix("warning: ")
    assert re.search(line, warning), warning
    assert "agree with plain torch: largest difference" in said.out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_wrong_compiled_code_is_found(kernel_of, monkeypatch, factor):
    def backend(graph, inputs):
        return lambda *given: [x * factor if x.is_floating_point() else x for x in graph(*given)]

    monkeypatch.setattr(torch, "compile", lambda function: COMPILE(function, backend=backend))
    gpt = model()
    compile_blocks(gpt, True)
    is_right = prove_micro_batch(gpt, *micro_batch(), HERE, WORLD)
    assert is_right == is_compiled(gpt) == kernels.enabled == (factor == 1.0)


def test_if_plain_torch_is_wrong_too_a_line_says_what_to_do(kernel_of):
    with pytest.raises(UserError, match=r"^0.3; in plain torch 0.3: .* runtime.proof=false"):
        proof.choose_form(model(), lambda: Difference(2.0, "0.3"), WORLD)


def test_a_process_that_lost_its_gpu_ends_with_a_line(monkeypatch):
    """After an illegal memory access everything fails."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(UserError, match=r"^CUDA error: an illegal .*: use runtime.kernels=false$"):
        proof.choose_form(model(), lost, World(torch.device("cuda")))


def test_a_difference_is_relative_to_the_norm_of_a_group_or_of_most():
    """NaN is wrong; a gradient far below the whole is compared with the whole."""
    expected = [{"large": torch.tensor([[3.0, 1.0, 1e-3]]), "small": torch.tensor([[1e-9]])}]
    expected += [{"large": torch.tensor([[4.0, 1.0, 1e-3]]), "small": torch.tensor([[1e-9]])}]

    def size_of(name, *values):
        off = [{key: torch.zeros_like(norm) for key, norm in norms.items()} for norms in expected]
        off[1][name] = torch.tensor([values])
        difference = compare_norms(off, expected, torch.bfloat16)
        assert f"in {name}, bound" in difference.text
        return difference.share * 2**-7

    assert size_of("large", 0.4, 0.0, 0.0) == pytest.approx(0.4 / 5 / 10)  # in both groups together
    assert size_of("large", 0.0, 0.1, 0.0) == pytest.approx(0.1 / math.sqrt(2) / 10)
    assert size_of("large", 0.0, 0.0, 0.01) == pytest.approx(
        0.01 / 0.01 / math.hypot(3.0, 4.0, 1.0, 1.0) / 10, rel=1e-3
    )
    assert size_of("large", math.nan, 0.0, 0.0) == math.inf
    assert size_of("small", 4e-6) == pytest.approx(1 / math.sqrt(2) / 10)


def test_outcomes_are_kept_for_a_model_and_options(tmp_path):
    def stored(gpt, dtype=torch.bfloat16, **options):
        return StoredProof(gpt, dtype, options)

    gpt = model()
    assert stored(gpt, shape=[8, 12]).read() is None
    for is_right in (True, False):
        stored(gpt, shape=[8, 12]).write(is_right)
        assert stored(gpt, shape=[8, 12]).read() is is_right
    others = stored(gpt, shape=[1, 96]), stored(gpt, torch.float32, shape=[8, 12]), stored(model(n_layer=1))
    assert [other.read() for other in others] == [None] * 3
    (path,) = (tmp_path / "cache/log_gpt/proofs").iterdir()
    path.write_text("{")
    assert stored(gpt, shape=[8, 12]).read() is None


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("wrong", [None, "the last tokens", "no state"])
def test_inference_compares_logits_once(kernel_of, monkeypatch, autocast, wrong):
    monkeypatch.setattr(proof, "_TEXT", 1024 if wrong == "the last tokens" else 80)

    def zeros_at_the_end(*inputs, **options):
        y, state = log_attention.BACKENDS["chunked"](*inputs, **options)
        return torch.cat([y[:, :, :-64], torch.zeros_like(y[:, :, -64:])], dim=2), state

    kernel_of({None: None, "the last tokens": zeros_at_the_end, "no state": without_state}[wrong])
    gpt = model() if autocast else model().bfloat16()
    for _ in range(2):
        kernels.enabled = True
        prove_logits(gpt, HERE, autocast)
        assert kernels.enabled == (wrong is None)
        monkeypatch.setattr(proof, "choose_form", None)  # the second time, the outcome is known


def test_a_run_proves_itself_once(tiny, kernel_of, monkeypatch, capsys):
    """A resumed run knows the outcome; one with other sequences does not."""
    kernel_of(loss=loss_with(1.02))
    opened = trainer.loop.choose_compute
    monkeypatch.setattr(trainer.loop, "choose_compute", lambda config: dataclasses.replace(opened(config), proof=True))
    sizes = {"runtime.micro_batch": 3, "model.position": {"name": "none"}}  # of 4 sequences: steps take 2 at a time
    config = tiny({"runtime.dtype": "bfloat16"} | sizes)
    for stop_at in (2, 4):
        fit(config.model_copy(update={"stop_at": stop_at}))
        assert not kernels.enabled
    said = capsys.readouterr()
    assert said.out.count("gradients of the first 2 sequences agree with plain torch") == 1
    assert said.err.count("this goes on in plain torch") == 1
    fit(tiny({"runtime.dtype": "bfloat16", "resume": "never", "seq_len": 8, "run_dir": config.run_dir / "8"} | sizes))
    assert capsys.readouterr().out.count("agree with plain torch") == 1


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
opened = trainer.loop.choose_compute
trainer.loop.choose_compute = lambda config: dataclasses.replace(opened(config), proof=True)
import atexit
atexit.register(lambda: print(os.environ["RANK"], "uses kernels:", kernels.enabled, file=sys.stderr))
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "option",
    [
        "strategy=ddp",
        pytest.param("strategy=fsdp", marks=pytest.mark.slow),
        pytest.param("context_parallel=2", marks=pytest.mark.slow),
    ],
)
def test_processes_agree(tiny_args, tmp_path, option):
    """The second process finds the loss wrong."""
    args = [*tiny_args, f"run_dir={tmp_path / 'run'}", f"runtime.{option}", "max_steps=2", "model/position=none"]
    results = ranks.run(2, "-c", PROVED, *args, XDG_CACHE_HOME=str(tmp_path / "cache"), TRITON_INTERPRET="1")
    for rank, result in enumerate(results):
        assert f"{rank} uses kernels: False" in result.err
    assert results[0].out.count("agree with plain torch") == 1
    assert "this goes on in plain torch" in results[0].err
