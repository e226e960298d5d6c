"""Kernels are used once they pass their check, which may also crash or hang; the outcome is kept."""

import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import fake_checks
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache

from common.console import say_once
from common.files import owned
from model.ops import checks, log_attention
from model.ops.checks import Wrong, failed_check, separate_compiled_code
from model.ops.kernels import _fastest_on_gpu
from model.ops.log_attention import check as log_attention_check
from model.ops.sparse_attention import attend
from model.ops.sparse_attention import check as sparse_attention_check

AGAIN = "to check again, remove log_gpt/checks/"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of outcomes, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checks, "outcomes", dict(checks.outcomes))
    failed_check.cache_clear()
    say_once.cache_clear()
    yield tmp_path / "log_gpt" / "checks"
    failed_check.cache_clear()


@pytest.mark.parametrize(
    ("check", "seconds", "reason"),
    [
        (fake_checks.crashes, 60, "failed a check: its process crashed (SIGABRT)"),
        pytest.param(
            *(fake_checks.does_not_compile, 60, "failed a check: RuntimeError: PassManager::run failed"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_fails_is_said_and_kept(kept, monkeypatch, check, seconds, reason):
    assert failed_check("a kernel", check, "cpu", seconds).startswith(f"{reason} ({AGAIN}")
    (file,) = kept.glob("*.json")
    assert json.loads(file.read_text())["failure"] == reason
    failed_check.cache_clear()
    monkeypatch.setattr(checks, "_run", None)  # it does not run again
    assert failed_check("a kernel", check, "cpu", seconds).startswith(reason)


def test_who_waits_for_a_check_says_so_all_the_time(kept, monkeypatch):
    """So that other processes don't take it for a process that hangs."""
    calls = []
    monkeypatch.setattr(checks, "waiting", [lambda: calls.append(None)])
    why = failed_check("a kernel", fake_checks.hangs, "cpu", 3)
    assert why.startswith(f"failed a check: it did not end within 3 seconds ({AGAIN}")
    assert len(calls) >= 2
    monkeypatch.setattr(checks, "_run", lambda *arguments: (None, ""))
    failed_check.cache_clear()
    (lock,) = kept.glob("*.lock")
    lock.with_suffix(".json").unlink()
    another = contextlib.ExitStack()
    another.enter_context(owned(lock, lambda: "taken"))
    calls.clear()
    monkeypatch.setattr(checks, "waiting", [lambda: calls.append(len(calls) == 1 and another.close())])
    assert failed_check("a kernel", fake_checks.hangs, "cpu", 3) is None
    assert len(calls) == 2


def test_what_may_pass_by_itself_is_not_kept(kept, monkeypatch):
    outcomes = [("failed a check: OutOfMemoryError: CUDA out of memory", "many lines"), (None, "")]
    monkeypatch.setattr(checks, "_run", lambda *arguments: outcomes.pop(0))
    assert failed_check("a kernel", fake_checks.passes, "cpu").endswith("CUDA out of memory (not kept)")
    failed_check.cache_clear()
    assert failed_check("a kernel", fake_checks.passes, "cpu") is None
    assert len(list(kept.glob("*.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "reason"), [(None, "no C compiler: install gcc"), ("gcc", "no Python.h: install")]
)
def test_what_triton_lacks_to_compile_is_said_and_the_check_repeated(kept, monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        (tmp_path / compiler).write_text(
            "#!/bin/sh\necho 'launcher.c:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
        )
        (tmp_path / compiler).chmod(0o755)
    why = failed_check("a kernel", fake_checks.compiles_a_launcher, "cpu")
    assert why.startswith(f"cannot be checked: Triton finds {reason}")
    assert why.endswith("(not kept)")


def test_what_passes_runs_once_for_each_version(kept, monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(checks, "_run", lambda check, arguments, *more: (ran.append(arguments), (None, ""))[1])

    def run(**arguments):
        failed_check.cache_clear()
        assert failed_check("a kernel", fake_checks.passes, "cpu", **arguments) is None
        return len(ran)

    assert run(d=1) == run(d=1) == 1
    assert run(d=2) == 2
    for file in kept.glob("*.json"):
        file.write_text("{")  # damaged
    assert (run(d=1), run(d=2), run(d=1)) == (3, 4, 4)
    monkeypatch.setattr(checks, "triton_version", lambda: "0.0")
    assert run(d=1) == 5
    path = tmp_path / "new.py"
    path.write_text("")
    monkeypatch.setattr(checks.inspect, "getfile", lambda check: str(path))
    assert run(d=1) == 6
    path.write_text("# changed")
    assert run(d=1) == 7
    assert capsys.readouterr().out.splitlines() == [
        f"checking a kernel on this machine ({checks.cpu_name()}), once: this takes at most 10 minutes"
    ]


@pytest.mark.slow
def test_compiled_code_of_other_operators_is_not_used(monkeypatch):
    misses = []
    with fresh_inductor_cache(), torch.compiler.config.patch(cache_key_tag=""):
        for sources in ("one", "one", "other"):
            monkeypatch.setattr(checks, "digest_of_sources", lambda sources=sources: sources)
            separate_compiled_code()
            torch.compiler.reset()
            counters.clear()
            torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # which needs no C++ compiler
            misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [1, 0, 1]


def test_without_a_folder_nothing_is_used(kept, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    why = failed_check("a kernel", fake_checks.passes, "cpu")
    assert why.startswith("cannot be checked: XDG_CACHE_HOME=")
    assert why.endswith("choose another folder")


@pytest.mark.slow
def test_of_two_processes_one_runs_it(kept, tmp_path):
    log = tmp_path / "log"
    code = f"""
from model.ops.checks import failed_check
import fake_checks
assert failed_check("a kernel", fake_checks.passes, "cpu", log={str(log)!r}, sleep=2) is None
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait(200) for process in running] == [0, 0]
    assert log.read_text() == "ran\n"


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("off", r"^y is off by 1.0e-03, and 1\.\de-06 is allowed \(squares\)$"),
        ("gradient_off", "^the gradient of x is off by"),
        ("Unsteady", r"^y has other bits in a second run \(squares\)$"),
    ],
)
def test_wrong_numbers_and_other_bits_do_not_pass(operator, reason):
    with pytest.raises(Wrong, match=reason):
        fake_checks.compares("cpu", operator)


def test_right_numbers_pass_and_nan_does_not():
    fake_checks.compares("cpu", "square")
    with pytest.raises(Wrong, match="y is off by nan"):
        checks.compare(
            "", lambda x: {"y": x.square() * torch.nan}, fake_checks.square, {"x": torch.ones(2, dtype=torch.bfloat16)}
        )


@pytest.mark.slow
def test_wrong_numbers_of_a_process_are_a_reason(kept):
    why = failed_check("a kernel", fake_checks.compares, "cpu", operator="off")
    assert why.startswith("failed a check: y is off by 1.0e-03")


def judged(right, message):
    """A check passes, or fails with this message."""
    return contextlib.nullcontext() if right else pytest.raises(Wrong, match=message)


@pytest.mark.parametrize("change", [1.0, 1.01])
@pytest.mark.parametrize("gates", [False, True], ids=["", "gates"])
def test_the_check_of_log_attention_tells_right_from_wrong(monkeypatch, gates, change):
    """With the chunked form in place of the kernels."""

    def form(q, segments, **options):
        return log_attention.chunked_log_attention(q * change, **options)

    monkeypatch.setitem(log_attention.BACKENDS, "triton", form)
    dtypes, sizes = (["float32"] * 4, [4, 4, 3, 1]) if gates else (["float32"] * 3, [4, 4, 3])
    with judged(change == 1, r"^log_y is off by .* \(no state, deviation 1, 70 tokens\)$"):
        log_attention_check.check("cpu", dtypes, sizes, lengths=(70,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "sizes"),
    [
        (("float32",) * 3, (4, 4, 3)),
        (("bfloat16", "bfloat16", "float32", "float32"), (4, 4, 3, 1)),
    ],
)
def test_the_kernels_pass_in_the_interpreter(kept, dtypes, sizes):
    pytest.importorskip("triton")
    check = log_attention_check.check
    assert failed_check("kernels", check, "cpu", 900.0, dtypes=dtypes, sizes=sizes, lengths=(5,)) is None


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_kernel_with_a_wrong_stride_does_not_pass(monkeypatch, dimension):
    """Of the batch, heads or tokens."""
    from model.ops.log_attention import triton

    def wrong(x, tokens=triton._tokens):
        pointer, strides = tokens(x)
        return triton.Tokens(pointer, (*strides[:dimension], 1, *strides[dimension + 1 :]))

    monkeypatch.setattr(triton, "_tokens", wrong)
    with pytest.raises(Wrong, match="log_y is off by"):
        log_attention_check.check("cpu", ["bfloat16"] * 3 + ["float32"], [4, 4, 3, 1], lengths=(5,))


def test_kernels_that_join_segments_wrongly_do_not_pass(monkeypatch):
    from model.ops.log_attention import triton

    def wrong(*given, right=triton._segments):
        found = right(*given)
        return found and found._replace(log_f=found.log_f + 1)

    def in_segments(case, *forms, inputs, compare=log_attention_check.compare):
        """One head of that case alone: the interpreter takes seconds for each of them."""
        if case.startswith("a state") and "2 segments" in case:
            compare(case, *forms, {name: x[:1, :1] for name, x in inputs.items()})

    monkeypatch.setattr(triton, "_segments", wrong)
    monkeypatch.setattr(log_attention_check, "compare", lambda *given: in_segments(*given[:-1], inputs=given[-1]))
    with pytest.raises(Wrong, match=r" is off by .* \(a state, deviation 1, 65 tokens, 2 segments\)$"):
        log_attention_check.check("cpu", ["bfloat16"] * 3 + ["float32"], [4, 4, 3, 1], lengths=(65,))


@pytest.mark.parametrize(("change", "dtype"), [(1.0, "float32"), (1.0, "bfloat16"), (1.1, "float32")])
def test_the_check_of_flex_attention_tells_right_from_wrong(monkeypatch, change, dtype):
    """FlexAttention has no backward pass on CPUs: tiles stand in for it."""

    def tiles(q, k, v, pattern, starts):
        documents = {} if starts is None else {"starts": starts}
        attention = attend.sparse_attention if starts is None else attend.document_attention
        return attention(q * change, k, v, [pattern], **documents)

    monkeypatch.setattr(attend, "_by_flex_attention", tiles)
    with judged(change == 1, r"^y is off by .* \(window\)$"):
        sparse_attention_check.check("cpu", dtype, 16, T=140)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("dtype", "wrong"), [("bfloat16", False), ("float64", True)])
def test_the_check_of_attention_that_forgets_tells_right_from_wrong(eager_flex, monkeypatch, dtype, wrong):
    """The wrong one has a gradient of gates that no feature passes on."""
    right = attend._forgetting
    monkeypatch.setattr(
        attend, "_forgetting", lambda q, k, log_f: right(q, k, log_f.detach() + 0 * log_f if wrong else log_f)
    )
    with judged(not wrong, r"^the gradient of log_f is off by .* \(gates\)$"):
        sparse_attention_check.check("cpu", dtype, 16, T=140, forgets=True)


@pytest.mark.parametrize("failure", [None, "failed a check: its process crashed (SIGABRT)"])
def test_kernels_are_used_where_they_pass(fake_gpu, kept, monkeypatch, capsys, failure):
    runs = []
    monkeypatch.setattr(checks, "_run", lambda *arguments: (runs.append(arguments), (failure, ""))[1])
    monkeypatch.setattr(attend, "_by_flex_attention", lambda *_, **__: "by flex")
    given = [(torch.bfloat16, 32)] * 3 + [(torch.float32, 1)]
    for _ in range(2):
        chosen = _fastest_on_gpu(
            *("log attention", "chunked", "triton", log_attention._check, log_attention._why_not_triton, 0), *given
        )
        assert chosen == ("triton" if failure is None else "chunked")
        queries = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16, shape=(1, 1, 8, 32))
        assert attend._form(queries) == ("flex" if failure is None else "masks")
        queries.is_cuda = True
        k = torch.zeros(1, 1, 8, 32)
        assert attend.forgetting_attention(queries, k, k, k, None) == ("by flex" if failure is None else None)
    (check, arguments, *_), (other, *_), (third, of_third, *_) = runs
    assert (third, of_third["forgets"]) == (other, True)
    assert check == "model.ops.log_attention.check:check"
    assert arguments == {"device": "cuda:0", "dtypes": ("bfloat16",) * 3 + ("float32",), "sizes": (32, 32, 32, 1)}
    assert other == "model.ops.sparse_attention.check:check"
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("checking log attention by triton on this machine (NVIDIA Test, compute cap")
    if failure is not None:
        assert lines[0].startswith(f"log attention uses chunked, which is slower: triton {failure}")
        assert lines[2].endswith(f"{failure} ({lines[2].partition('SIGABRT) (')[2]}")
