"""The report shows what metrics.jsonl contains, whatever that is; its page never runs untrusted code."""

import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess

import pytest
from printed import assert_one_line

from tools.report.page import page_of
from tools.report.records import labels, lowest_loss, read_records, varying_settings
from tools.report.write import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=document.title='owned'>$\\frac$ {{DATA}} ${x} \x1b[2J\n\u202e_"


def train(step, loss, rate=100.0):
    return {"step": step, "tokens": 64 * step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": rate}


def val(step, loss):
    return {"step": step, "tokens": 64 * step, "val_loss": loss, "val_bits_per_byte": loss / math.log(2)}


def make_run(folder, lines, config=None, environment=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        environment = environment or {"n_params": 1000, "flops_per_token": 6000}
        (folder / "config.json").write_text(json.dumps({"config": config, "environment": environment}))
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Three learning rates and two seeds; the loss is 1 + 100 * lr + seed / 10."""
    for lr in (0.001, 0.01, 0.03):
        for seed in (1, 2):
            lines = [line for i in range(1, 7) for line in (train(i, 5 - i / 6), val(i, 7 - i + 100 * lr + seed / 10))]
            config = {"run_dir": f"x/{lr},{seed}", "max_steps": 6, "seed": seed, "optim": {"max_lr": lr, "eps": None}}
            make_run(tmp_path / "sweep" / f"optim.max_lr={lr},seed={seed}", lines, config)
    return tmp_path / "sweep"


def test_models_that_differ_in_the_last_of_many_layers_are_not_seeds_of_one(tmp_path):
    for seed, last in ((1, "softmax"), (2, "sliding_window")):
        pattern = [{"name": "log_space", "decay": "head", "product": True, "d_key": 16, "gate": "silu"}] * 4
        config = {"seed": seed, "model": {"attention_pattern": [*pattern, {"name": last}]}}
        make_run(tmp_path / last, [val(1, 2.0)], config)
    assert len(read_records([tmp_path])) == 2


def test_the_lowest_loss_is_in_bits_per_byte_if_tokens_differ(tmp_path):
    make_run(tmp_path / "bytes", [val(1, 1.0)], {"dataset_dir": "bytes"})
    assert lowest_loss(read_records([tmp_path])) == "1.0000 nats per token"
    make_run(tmp_path / "words", [val(1, 3.2) | {"val_bits_per_byte": 1.1}], {"dataset_dir": "words"})
    make_run(tmp_path / "new", [train(1, 5.0)], {"dataset_dir": "words"})
    records = read_records([tmp_path])
    assert lowest_loss(records) == "1.1000 bits per byte"
    assert [record.figures["best"] for record in records] == [1.1, pytest.approx(1 / math.log(2)), None]
    assert data_of(page_of(records, "x"))["in_bits"]


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_runs_that_are_validated_on_other_tokens_cause_a_warning(tmp_path, capsys):
    for n, loss in ((3, "all"), (7, "answers")):
        config = {"dataset_dir": f"datasets/{loss}", "data": {"loss": loss}, "eval": {"every": n}}
        make_run(tmp_path / loss, [val(1, n)], config | {"checkpoint": {"every": n}, "seed": 1})
    write_report([tmp_path], None)
    said = capsys.readouterr()
    assert "runs differ in dataset_dir and data.loss: losses of other validation tokens" in said.err
    assert "token: loss=all, checkpoint.every=3, dataset_dir=datasets/all, eval.every=3\n" in said.out


def test_the_figures_are_those_of_the_lines(tmp_path):
    lines = [train(1, 4.0, rate=64.0), train(2, 3.0, rate=32.0), val(2, 3.5)]
    lines += [train(3, 2.0, rate=16.0), val(3, 2.5), val(4, 2.75)]
    make_run(tmp_path / "run", lines, {"max_steps": 10}, {"n_params": 7, "flops_per_token": 10})
    (record,) = read_records([tmp_path])
    seconds = 1 + 2 + 4
    assert record.figures == {
        **{"step": 4, "tokens": 256, "flops": 2560, "seconds": seconds, "max_steps": 10, "n_params": 7},
        **{"nats": 2.5, "best": 2.5, "best_step": 3, "bits": 2.5 / math.log(2), "loss": 2.0, "rate": 32.0},
        **{"low": 2.5, "high": 2.5, "runs": 1},
    }
    losses = [tuple(p[key] for key in ("tokens", "flops", "seconds", "value")) for p in record.curves["loss"]]
    assert losses == [(64, 640, 1, 4.0), (128, 1280, 3, 3.0), (192, 1920, 7, 2.0)]
    evaluated = [(p["step"], p["seconds"], p["value"]) for p in record.curves["val_loss"]]
    assert evaluated == [(2, 3, 3.5), (3, 7, 2.5), (4, 7, 2.75)]
    assert [p["value"] for p in record.curves["lr"] + record.curves["grad_norm"]] == [0.1] * 3 + [1.0] * 3


def test_a_long_run_is_thinned_to_means_and_ranges(tmp_path):
    make_run(tmp_path / "run", [train(i, float(i)) for i in range(1, 3001)])
    (record,) = read_records([tmp_path / "run"])
    points = record.curves["loss"]
    assert len(points) == 188  # 16 steps each, as 300 points of 8 would not do
    assert [p["value"] for p in points[:2]] == pytest.approx([8.5, 24.5])
    assert [(p["low"], p["high"]) for p in points[:2]] == [(1, 16), (17, 32)]
    assert [p["step"] for p in points[-2:]] == [2992, 3000]


def test_seeds_are_one_row_with_their_mean_range_and_number_the_best_first(sweep):
    records = read_records([sweep])
    found = [[record.figures[key] for key in ("best", "low", "high", "runs")] for record in records]
    assert found == [pytest.approx(row) for row in ([1.25, 1.2, 1.3, 2], [2.15, 2.1, 2.2, 2], [4.15, 4.1, 4.2, 2])]
    assert varying_settings(records) == ["optim.max_lr"]
    assert records[0].name == "optim.max_lr=0.001,seed=1, optim.max_lr=0.001,seed=2"
    assert labels(records)[0] == "max_lr=0.001 (mean of 2 runs)"
    assert records[0].settings["seed"] == "1, 2"
    assert [p["value"] for p in records[0].curves["val_loss"]] == pytest.approx([7.25 - i for i in range(1, 7)])


def test_seeds_of_which_one_is_behind_lose_no_point(sweep):
    path = sweep / "optim.max_lr=0.001,seed=2" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    record = next(record for record in read_records([sweep]) if record.settings["optim.max_lr"] == 0.001)
    assert record.figures["step"] == 3
    assert [p["step"] for p in record.curves["val_loss"]] == [1, 2, 3]
    assert [len(member.curves["val_loss"]) for member in record.members] == [6, 3]
    members = next(run for run in data_of(page_of([record], "x"))["runs"])["members"]
    assert [len(member["curves"]["val_loss"]["value"]) for member in members] == [6, 3]


def test_runs_that_may_differ_in_more_than_the_seed_are_no_group(tmp_path):
    for i, config in enumerate([{"seed": 1}, {"seed": 2}, {"seed": 2}, {"seed": 3, "n": 2}, {}]):
        make_run(tmp_path / str(i), [val(1, 3.0)], config)
    assert [record.members for record in read_records([tmp_path])] == [()] * 5


def test_a_report_is_one_page_and_a_picture(command, sweep, tmp_path):
    result = command("scripts/report", f"folders={sweep}", f"out={tmp_path / 'out'}")
    assert result.status == 0, result.err
    assert "6 runs; lowest validation loss 1.2500 nats per token: max_lr=0.001 (mean of 2 runs)" in result.out
    paths = sorted((tmp_path / "out").iterdir())
    assert re.findall(r"written: (.*)", result.out) == list(map(str, paths))
    page, picture = paths
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    data = data_of(page.read_text())
    assert data["keys"] == ["optim.max_lr"]
    assert data["runs"][0]["settings"] == {"optim.max_lr": 0.001}
    assert data["runs"][0]["curves"].keys() == {"val_loss", "val_bits_per_byte", "loss", "lr", "grad_norm"}
    assert data["runs"][0]["curves"]["val_loss"]["value"][-1] == pytest.approx(1.25)
    assert data["runs"][0]["curves"]["val_loss"]["flops"][-1] == 64 * 6 * 6000
    assert not re.search(r"(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import|fetch\(", page.read_text())


def test_runs_of_several_folders_are_compared_where_they_meet(sweep, tmp_path):
    make_run(tmp_path / "other", [val(1, 9.0)], {"seed": 3})
    write_report([sweep, tmp_path / "other", sweep], None)
    assert len(data_of((tmp_path / "report.html").read_text())["runs"]) == 4


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [train(1, 4.0)],
        [val(1, 4.0), val(2, 4.0)],
        [{"step": 1, "tokens": 64, "event": "skipped", "loss": "nan"}],
        [train(1, 4.0, rate=None), val(1, 4.0)],
        [train(1, 4.0, rate=5e-324), val(1, 4.0)],
        [train(i, 1e308) for i in range(1, 3000)] + [val(i, 1e308 / i) for i in range(1, 9)],
        [{"step": 1, "tokens": 10**400, "loss": 4.0}, {"step": 2, "tokens": 1e308, "val_loss": 4.0}],
        [{"step": 1, "tokens": 64, "loss": True, "val_loss": [], "tokens_per_second": {}}],
        [{"step": -(10**30), "tokens": -64, "loss": -1.0, "val_loss": 0}],
    ],
)
def test_any_lines_make_a_report(tmp_path, lines):
    make_run(tmp_path / "a", lines, {"n": 1})
    make_run(tmp_path / "b", [val(1, 3.0)], {"n": 2})
    data = data_of(write_report([tmp_path], None).read_text())
    assert len(data["runs"]) == 2


def test_numbers_that_are_none_are_no_losses(tmp_path):
    path = make_run(tmp_path / "a", [val(1, 3.0)]) / "metrics.jsonl"
    path.write_text(
        path.read_text() + '{"step": 2, "tokens": 128, "val_loss": NaN}\n{"step": 3, "tokens": 1, "val_loss": 1e999}\n'
    )
    (record,) = read_records([tmp_path])
    assert [p["value"] for p in record.curves["val_loss"]] == [3.0]


@pytest.mark.parametrize("config", [None, [], "x", {"a": {"b": [1, {"c": HOSTILE}]}}, {str(i): i for i in range(1000)}])
def test_any_configuration_makes_a_report(tmp_path, config):
    make_run(tmp_path / "a", [val(1, 3.0)], config)
    make_run(tmp_path / "b", [val(1, 3.0), val(2, 2.0)], {"seed": 2})
    assert len(data_of(page_of(read_records([tmp_path]), "x"))["runs"]) == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
@pytest.mark.parametrize(
    "replace",
    [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, os.mkdir, lambda path: path.write_text("{\n")],
    ids=["link", "pipe", "folder", "damaged"],
)
def test_what_is_no_file_costs_a_warning(tmp_path, capsys, name, replace):
    make_run(tmp_path / "good", [val(1, 3.0)], {"n": 1})
    path = make_run(tmp_path / "bad", [val(1, 2.0)], {"n": 2}) / name
    path.unlink()
    replace(path)
    records = read_records([tmp_path])
    left_out = name == "metrics.jsonl" and not path.is_file()
    assert len(records) == 2 - left_out
    assert capsys.readouterr().err.count("warning: ") == 1


def test_failed_runs_are_named_with_the_last_line_of_their_error(sweep, monkeypatch, capsys):
    begun, never = sweep / "optim.max_lr=9", sweep / "optim.max_lr=99"
    make_run(begun, [train(1, 9.0)], {"max_steps": 6, "seed": 1, "optim": {"max_lr": 9}})
    never.mkdir()
    (sweep / "optim.max_lr=0.001,seed=1" / "error.txt").write_text("it has gone on since")
    os.utime(sweep / "optim.max_lr=0.001,seed=1" / "error.txt", (0, 0))
    for folder, error in ((begun, "step 2: loss is nan\n"), (never, "Traceback\nout of memory\n")):
        (folder / "error.txt").write_text(error)
    monkeypatch.setattr("tools.report.write.time.sleep", lambda seconds: None)
    runs = data_of(write_report([sweep], None, watch=True).read_text())["runs"]
    failures = {"optim.max_lr=9": "step 2: loss is nan", "optim.max_lr=99": "out of memory"}
    assert {run["name"]: run["failure"] for run in runs if run["failure"]} == failures
    assert capsys.readouterr().err == "".join(f"warning: {name} failed: {why}\n" for name, why in failures.items())
    assert [run["settings"]["optim.max_lr"] for run in runs] == [0.001, 0.01, 0.03, 9, "null"]


def test_links_lead_nowhere(sweep, tmp_path):
    (sweep / "again").symlink_to(sweep)
    (sweep / "elsewhere").symlink_to(make_run(tmp_path / "private", [val(1, 1.0)]))
    assert sum(len(record.members) for record in read_records([sweep])) == 6


@pytest.mark.parametrize("given", ["empty", "missing", "file", "[]"])
def test_without_a_run_there_is_one_line(command, tmp_path, monkeypatch, given):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert_one_line(command("scripts/report", f"folders={given}"), given)
    if given == "empty":
        run = make_run(tmp_path / "run", [val(1, 3.0)])
        assert command("scripts/report", f"folders={run},empty").err.startswith("warning: no run in empty: a run has")


def test_a_page_follows_a_sweep_from_job_to_job_whatever_it_meets(tmp_path, monkeypatch, capsys):
    """Browsers load it again and again, and see what runs have written since; the last page stays as it is."""
    looks, first = itertools.count(1), make_run(tmp_path / "sweep" / "a", [val(1, 3.0)], {"max_steps": 2})
    damaged, whole = '{"step": 1, \n', json.dumps(val(2, 3.0)) + "\n"
    page, steps = tmp_path / "sweep" / "report.html", []

    def wait(seconds):
        assert f'http-equiv="refresh" content="{seconds:g}"' in page.read_text()
        steps.append([run["figures"]["step"] for run in data_of(page.read_text())["runs"]])
        match next(looks):
            case 1:
                (first / "metrics.jsonl").write_text(whole)
            case 3:
                first.rename(tmp_path / "elsewhere")
            case 4:
                (tmp_path / "elsewhere").rename(first)
                (first / "metrics.jsonl").write_text(damaged + whole)
            case 5:
                (first / "metrics.jsonl").write_text(whole)
                make_run(tmp_path / "sweep" / "b", [val(1, 2.0)], {"max_steps": 2})
            case 6:
                (tmp_path / "sweep" / "b" / "metrics.jsonl").write_text(whole)

    monkeypatch.setattr("tools.report.write.time.sleep", wait)
    assert write_report([tmp_path / "sweep"], None, watch=True) == page
    assert (steps[:3], steps[-1]) == ([[1], [2], [2]], [2, 2])
    assert next(looks) == 6 + 12
    assert 'http-equiv="refresh"' not in page.read_text()
    assert len(data_of(page.read_text())["runs"]) == 2
    err = capsys.readouterr().err
    assert err.count("trying again in 10 seconds") == err.count("left out 1 line that cannot be read") == 1


def test_torch_is_not_imported(run_process):
    run_process(["-c", "import sys, tools.report.write; sys.exit('torch' in sys.modules)"])


class Elements(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def hostile(tmp_path):
    """A sweep whose every name and setting tries to be HTML, a formula or a command to the terminal."""
    for i in range(3):
        config = {
            "optim": {HOSTILE: f"{i}{HOSTILE}", "max_lr": i + 1},
            "__proto__": {"constructor": i},
            "seed": HOSTILE * (i + 1),
        }
        name = os.fsencode(HOSTILE.replace("/", "|")) + b"\xff%d" % i
        folder = os.path.join(os.fsencode(tmp_path / "sweep"), name)
        make_run(tmp_path / "made" / str(i), [train(1, 4.0), val(1, 3.0 + i), val(2, 2.0 + i)], config)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.rename(os.fsencode(tmp_path / "made" / str(i)), folder)
    return tmp_path / "sweep"


def test_names_and_settings_stay_text(hostile, sweep, capsys):
    page = write_report([hostile], None).read_text(encoding="utf-8")
    harmless = write_report([sweep], None).read_text(encoding="utf-8")
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(harmless).found]
    assert "{{DATA}}" in json.dumps(data_of(page))
    assert "\x1b" not in page + capsys.readouterr().out


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or not os.environ.get("BROWSER_TESTS"), reason="tests in a browser need BROWSER_TESTS=1, chromium"
)


def dom_of(path, tmp_path):
    """The page in a browser, after its scripts have run."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --virtual-time-budget=2000 --dump-dom"
    line = [CHROMIUM, *flags.split(), *more.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    return subprocess.run(line, capture_output=True, timeout=60).stdout.decode()


@needs_chromium
def test_in_a_browser_names_stay_text(hostile, tmp_path):
    dom = dom_of(write_report([hostile], None), tmp_path)
    elements = Elements(dom).found
    assert sum("data-run" in attributes for tag, attributes in elements if tag == "tr") == 3
    assert not [tag for tag, _ in elements if tag in ("img", "iframe", "a", "object")]
    assert not [attributes for _, attributes in elements if any(name.startswith("on") for name in attributes)]
    assert "<title>owned" not in dom
    assert sum(tag == "path" for tag, _ in elements) == 3  # parallel coordinates
    assert sum(tag == "polyline" for tag, _ in elements) == 3 * 3


@needs_chromium
@pytest.mark.parametrize(
    ("evaluations", "words", "chart", "drawn"),
    [
        (3, False, "validation loss (nats per token)", 26),
        (1, False, "training loss (nats per token)", 26),
        (1, True, "validation loss (bits per byte)", 27),
    ],
)
def test_in_a_browser_the_chart_shows_every_group_by_what_can_be_compared(tmp_path, evaluations, words, chart, drawn):
    for lr, seed in itertools.product(range(26), (1, 2)):
        lines = [train(i, 5.0 - i / 9) for i in range(1, 5)] + [val(i, 5.0 - i / 9) for i in range(1, 1 + evaluations)]
        make_run(tmp_path / f"runs/{lr},{seed}", lines, {"max_steps": 9, "seed": seed, "optim": {"max_lr": lr}})
    if words:
        make_run(
            tmp_path / "runs/words", [val(1, 3.2) | {"val_bits_per_byte": 1.1}], {"seed": 1, "dataset_dir": "words"}
        )
    dom = dom_of(write_report([tmp_path / "runs"], None), tmp_path)
    main = re.search(r'<div class="chart" id="curves">(.*?)</svg>', dom, re.DOTALL)[1]
    assert f">{chart}</text>" in main
    points = [re.search(r'points="([^"]*)"', line)[1] for line in re.findall(r'<polyline class="run"[^>]*>', main)]
    dots = main.count("<circle")
    assert sum(" " in path for path in points) + dots == drawn


CLICKS = """
const heading = (name) => [...document.querySelectorAll("#runs th button")].find((b) => b.textContent.includes(name));
heading("max_lr").click();
heading("max_lr").click();
document.querySelector("#controls select:last-of-type").dispatchEvent(new Event("change"));
document.querySelector("#runs tbody tr").click();
"""


@needs_chromium
def test_in_a_browser_the_table_is_sorted_and_runs_are_hidden(sweep, tmp_path):
    path = write_report([sweep], None)
    page = re.sub(r"script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", path.read_text(encoding="utf-8"))
    path.write_text(page.replace("</body>", f"<script>{CLICKS}</script></body>"), encoding="utf-8")
    dom = dom_of(path, tmp_path)
    rows = re.findall(r'<tr data-run="(\d)" class="(\w*)">(.*?)</tr>', dom)
    assert [run for run, _, _ in rows] == ["2", "1", "0"]
    assert [shade for _, shade, _ in rows] == ["off", "", ""]
    assert dom.count("<polyline") == 2 * 3 * 3  # groups, with their mean and two runs, in three charts
    assert re.search(r"#runs|best of|1\.2000", dom)
