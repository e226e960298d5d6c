"""What every command and script has in common: a short --help, quickly; errors of one line; colours where wanted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from printed import assert_one_line

from common.settings import UserError
from tools.bench.run import BenchConfig

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["train.py", "eval.py", "sample.py"]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").glob("*.py"))
SLOW = ("torch", "matplotlib", "transformers", "triton", "datasets", "wandb", "fastapi", "pyarrow")
HELP = """
import contextlib, io, json, runpy, sys
found = {}
for script in sys.argv[2:]:
    before = set(sys.modules)
    sys.argv = [script, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    loaded = [name for name in SLOW if name in sys.modules and name not in before]
    found[script] = [out.getvalue(), loaded]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps():
    """What each command's --help prints, and the slow libraries that it has imported until then."""
    source = f"SLOW = {SLOW!r}\n{HELP}"
    env = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", source, "", *COMMANDS, *SCRIPTS], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_help_waits_for_no_slow_library(helps):
    """All commands run in one process in turn, so an import is listed at the first command that needs it."""
    assert {script: loaded for script, (_, loaded) in helps.items() if loaded} == {}


@pytest.mark.parametrize("script", [*COMMANDS, *SCRIPTS])
def test_help_fits_a_screen_and_shows_examples(helps, script):
    text = helps[script][0]
    lines = text.splitlines()
    assert 5 < len(lines) <= 51
    assert max(map(len, lines)) <= 120
    assert f"python {script}" in text
    assert "--debug" in text


@pytest.fixture
def script(command, monkeypatch):
    """Runs scripts/bench.py with these words, its work replaced by a function; returns what the command does."""

    def run(work, *words):
        monkeypatch.setattr("tools.bench.run.bench", work)
        return command("scripts/bench", *words)

    return run


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["steps=4", "out=a=b c"], {"steps": 4, "out": Path("a=b c")}),
        (["models=x"], {"models": ["x"]}),
        (["models=[x, y]"], {"models": ["x", "y"]}),
        (["models=[x=1,y=2],z=3"], {"models": ["x=1,y=2", "z=3"]}),
        (["models=[[x,y]]"], {"models": ["x,y"]}),
        (["models=a=[x,y],b=1"], {"models": ["a=[x,y]", "b=1"]}),
        (["set=[]", "out=null"], {"set": []}),
    ],
)
def test_options_are_keys_and_values(script, words, given):
    found = []
    assert script(found.append, *words).status == 0
    assert found == [BenchConfig(**given)]


def test_a_functions_arguments_are_the_keys_of_its_command(command, monkeypatch):
    found = []

    def convert(checkpoint: Path, run_dir: Path, n_kv_head: int) -> None:
        found.append((checkpoint, run_dir, n_kv_head))

    monkeypatch.setattr("tools.convert.gqa.convert", convert)
    words = ["checkpoint=runs/a", "run_dir=runs/42", "n_kv_head=2"]
    assert command("scripts/convert_gqa", *words).status == 0
    assert found == [(Path("runs/a"), Path("runs/42"), 2)]
    assert command("scripts/convert_gqa", *words[:2]).err.startswith("error: Missing mandatory value: n_kv_head")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "20"], "unrecognized arguments: --steps"),
        (["out=caf\udce9"], "an option is not in UTF-8, which JSON files need: rename what it names"),
    ],
)
def test_mistakes_and_old_flags_are_one_line(script, words, message):
    result = script(print, *words)
    assert (result.status, result.err) == (1, f"error: {message}\n")


def test_a_command_answers_what_a_user_can_mend_in_one_line(script):
    def fail(options):
        raise UserError("out=/x:art: cannot be written: [choose] another")

    assert script(fail) == (1, "", "error: out=/x:art: cannot be written: [choose] another\n")
    with pytest.raises(UserError):
        script(fail, "--debug")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory: use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."), "out of memory: use smaller batches"),
        (RuntimeError("CUDA error: no kernel image is available for execution\non"), "this torch has no kernels for"),
        (ModuleNotFoundError(name="uvicorn"), "uvicorn is not installed: pip install -e '.[serve]'"),
    ],
)
def test_what_the_machine_lacks_is_one_line(script, error, line):
    def fail(options):
        raise error

    status, out, err = script(fail)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {line}")


def test_links_that_lead_to_themselves_are_one_line(script, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    status, out, err = script(lambda options: (tmp_path / "loop").resolve().read_text())
    assert (status, out, err.count("\n"), f"{tmp_path}/loop" in err) == (1, "", 1, True)


def test_an_error_of_the_system_is_its_file_and_its_reason(script):
    assert script(lambda options: Path("no/such").read_text()) == (1, "", "error: no/such: No such file or directory\n")


@pytest.mark.parametrize(
    ("line", "package"),
    [("train.py dataset_dir=x", "hydra"), ("eval.py checkpoint=x", "torch"), ("scripts/report.py", "rich")],
)
def test_an_interrupt_while_packages_are_imported_is_one_line(tmp_path, line, package):
    """The package is replaced by a file that presses Ctrl-C."""
    (tmp_path / f"{package}.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("train.py -m dataset_dir=DATASET run_dir=FOLDER seed=1,2", "multirun.yaml"),
        ("scripts/report.py folders=FOLDER", "report.html"),
        ("scripts/doctor.py out=FOLDER/a.json", "a.json"),
        ("scripts/bench.py out=FOLDER/a.json", "a.json"),
    ],
)
def test_a_file_of_the_users_is_not_replaced(command, dataset_dir, tmp_path, line, file):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "loss": 3.0}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text("mine")
    script, *options = line.replace("DATASET", str(dataset_dir)).replace("FOLDER", str(tmp_path)).split()
    result = command(script.removesuffix(".py"), *options)
    assert_one_line(result, f"{tmp_path / file} exists and is not from this command, which would replace it: rename it")
    assert (tmp_path / file).read_text() == "mine"


def test_a_command_that_is_interrupted_says_so(command, monkeypatch):
    def interrupt(checkpoint: Path, out_dir: Path, average: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.convert.export_hf.export", interrupt)
    said = "error: interrupted; nothing was written\n"
    assert command("scripts/export_hf", "checkpoint=x", "out_dir=y") == (130, "", said)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_option_is_refused(command, script):
    result = command(script.removesuffix(".py"), "--no-such-option=1", "x")
    assert result.status not in (0, None)
    assert "error: " in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


# Each makes file number n fail in its own way. Python has no stream of a file that is closed when it starts.
FAILING = {
    "closed": "os.close(n); setattr(sys, name, None); setattr(sys, f'__{name}__', None)",
    "no reader": "r, w = os.pipe(); os.close(r); os.dup2(w, n)",
    "full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), n)",
    "does not block": "r, w = os.pipe(); os.set_blocking(w, False); os.write(w, bytes(65536)); os.dup2(w, n); "
    "threading.Timer(0.5, os.read, (r, 65536)).start()",
    "ascii": "getattr(sys, name).reconfigure(encoding='ascii', errors='strict')",
}


def with_failing(way, names, script, *arguments, status=0):
    """Runs a script in a process whose standard streams of these names fail."""
    failing = f"for n, name in {names}: {FAILING[way]}"
    source = f"import os, runpy, sys, threading\n{failing}\nrunpy.run_path({script!r}, run_name='__main__')"
    (result,) = ranks.run(1, "-c", source, *arguments, status=status)
    return result


@pytest.mark.parametrize("way", FAILING)
def test_output_that_fails_does_not_stop_training(tiny_args, tmp_path, way):
    run_dir = tmp_path / "caf\xe9"
    with_failing(way, [(1, "stdout"), (2, "stderr")], "train.py", *tiny_args, f"run_dir={run_dir}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("way", "status", "err"),
    [
        ("closed", 0, ""),
        ("no reader", 128 + signal.SIGPIPE, ""),
        ("full disk", 1, "error: standard output: No space left on device\n"),
        ("does not block", 0, ""),
    ],
)
def test_output_that_fails_ends_other_commands_as_it_ends_unix_tools(way, status, err):
    result = with_failing(way, [(1, "stdout")], "scripts/inspect_dataset.py", "--help", status=status)
    assert result.err == err


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_colours_are_for_terminals(terminal):
    """On a pseudo-terminal and on a pipe."""
    import pty

    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm-256color"}
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "scripts/verify_dataset.py", "dataset_dir=/no/such"],
        cwd=ROOT,
        env=env,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1024)
        except OSError:  # how a pseudo-terminal ends
            break
        if not part:
            break
        said += part
    assert process.wait() == 1
    os.close(ours)
    assert said.lstrip(b"\x1b[0123456789;m").startswith(b"error: ")
    assert (b"\x1b[31m" in said) == terminal


@pytest.mark.slow
def test_a_plan_that_takes_long_can_be_interrupted():
    command = "scripts/plan.py model=heinsen_1m measure=true runtime.device=cpu runtime.dtype=float32"
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith(
        "measuring a few steps on the CPU"
    )  # everything is imported, and measuring begins
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "error: interrupted\n"
