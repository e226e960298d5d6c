"""The report shows what metrics.jsonl contains, whatever that is; its page runs no code and loads nothing."""

import base64
import html.parser
import itertools
import json
import math
import os
import statistics

import pytest
from printed import assert_one_line

from tools.report import find_varying, group_seeds, read_runs, write_report

HOSTILE = "</td><script>x</script><img src=x onerror=alert()>$\\frac$ {title} ${x} \x1b[2J\n\u202e_"


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
    for lr, seed in itertools.product((0.001, 0.01, 0.03), (1, 2)):
        lines = [train(i, 5 - i / 6) for i in range(1, 7)]
        lines += [val(i, 7 - i + 100 * lr + seed / 10) for i in range(1, 7)]
        config = {"run_dir": f"x/{lr},{seed}", "max_steps": 6, "seed": seed, "optim": {"max_lr": lr, "eps": None}}
        make_run(tmp_path / "sweep" / f"optim.max_lr={lr},seed={seed}", lines, config)
    return tmp_path / "sweep"


class Page(html.parser.HTMLParser):
    """A page's tags with their attributes, and its table as one dict for each row."""

    def __init__(self, path):
        super().__init__()
        self.tags = []
        self.rows = []
        self.feed(path.read_text(encoding="utf-8"))
        names, *rows = self.rows
        self.table = [dict(zip(names, row, strict=True)) for row in rows]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_a_report_is_one_page_with_the_figures_of_the_runs(command, sweep, tmp_path):
    result = command("scripts/report", f"folders={sweep}", f"out={tmp_path / 'out'}")
    assert result.status == 0, result.err
    best = "optim.max_lr=0.001,seed=1 (mean of 2 seeds)"
    assert f"6 runs; lowest validation loss 1.2500 nats per token: {best}" in result.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    page = Page(tmp_path / "out" / "report.html")
    loss = "lowest validation loss (nats per token)"
    assert [(row["optim.max_lr"], row["seed"], row[loss], row["range of seeds"]) for row in page.table] == [
        ("0.001", "1, 2", "1.2500", "1.2000 to 1.3000"),
        ("0.01", "1, 2", "2.1500", "2.1000 to 2.2000"),
        ("0.03", "1, 2", "4.1500", "4.1000 to 4.2000"),
    ]
    cells = {
        "step": "6",
        "of steps": "6",
        "training loss": "4.0000",
        "bits per byte": f"{1.25 / math.log(2):.4f}",
        "tokens per second": "100",
        "parameters": "1,000",
        "folder": "optim.max_lr=0.001,seed=1; optim.max_lr=0.001,seed=2",
    }
    assert cells.items() <= page.table[0].items()
    (image,) = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert base64.b64decode(image.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_runs_of_different_vocabularies_are_ranked_by_bits_per_byte(command, tmp_path):
    """A token of the second holds twice the text, and costs less than twice as much."""
    for name, nats, bits in (("bytes", 2.0, 2.885), ("pairs", 3.0, 2.164)):
        line = val(1, nats) | {"val_bits_per_byte": bits, "val_bits_per_byte_stderr": 0.25}
        make_run(tmp_path / name, [line], {"seed": 1, "dataset_dir": name}, {"tokenizer": name})
    result = command("scripts/report", f"folders={tmp_path}")
    assert "lowest validation loss 2.1640 ± 0.2500 bits per byte: pairs" in result.out
    assert "runs have different vocabularies: bits per byte of the same text can be compared" in result.err
    keys = ("folder", "lowest validation loss (bits per byte)", "nats per token")
    assert [[row[key] for key in keys] for row in Page(tmp_path / "report.html").table] == [
        ["pairs", "2.1640 ± 0.2500", "3.0000"],
        ["bytes", "2.8850 ± 0.2500", "2.0000"],
    ]


def test_a_difference_is_judged_by_its_own_standard_error(tmp_path):
    """The same windows are hard for all runs. What a run differs by in each of them is what counts."""
    of_best = [1.5, 2.5] * 8
    noise = [0.1, 0.1, -0.1, -0.1] * 4
    runs = {
        "best": of_best,
        "equal": [x + 0.001 + e for x, e in zip(of_best, noise, strict=True)],
        "worse": [x + 0.002 for x in of_best],
    }
    for name, groups in runs.items():
        line = val(1, statistics.fmean(groups)) | {"val_loss_stderr": 0.125, "val_loss_groups": groups}
        make_run(tmp_path / name, [line], {"n": name})
    table = {row["folder"]: row["above the best"] for row in Page(write_report([tmp_path], None)).table}
    stderr = statistics.stdev(noise) / 4
    assert table == {"best": "", "equal": f"0.0010 ± {stderr:.4f} (equal)", "worse": "0.0020 ± 0.0000"}


def test_seeds_add_what_they_differ_by(tmp_path):
    for lr, seed, loss in ((1, 0, 2.0), (1, 1, 2.2), (2, 0, 2.3), (2, 1, 2.7)):
        line = val(1, loss) | {"val_loss_groups": [loss] * 16}
        make_run(tmp_path / f"{lr} {seed}", [line], {"seed": seed, "optim": {"max_lr": lr}})
    _, second = Page(write_report([tmp_path], None)).table
    assert second["above the best"] == f"0.4000 ± {math.hypot(0.1, 0.2):.4f} (equal)"


def test_the_curves_are_those_of_the_lines(sweep, monkeypatch):
    from common.figures import encode_png

    drawn = []
    monkeypatch.setattr("tools.report.encode_png", lambda figure: drawn.append(figure) or encode_png(figure))
    write_report([sweep / "optim.max_lr=0.001,seed=1"], None)
    evaluated, trained = (axes.lines[0].get_xydata().tolist() for axes in drawn[0].axes)
    assert evaluated == [pytest.approx([64 * step, 7.2 - step]) for step in range(1, 7)]
    assert trained == [pytest.approx([64 * step, 5 - step / 6]) for step in range(1, 7)]


def test_models_that_differ_in_the_last_of_many_layers_are_not_seeds_of_one(tmp_path):
    layers = [{"name": "log_space", "decay": "head", "product": True, "d_key": 16, "gate": "silu"}] * 4
    for last in ("softmax", "sliding_window"):
        config = {"seed": last, "model": {"attention_pattern": [*layers, {"name": last}]}}
        make_run(tmp_path / last, [val(1, 2.0)], config)
    assert len(group_seeds(read_runs([tmp_path]))) == 2


def test_runs_that_are_validated_on_other_tokens_cause_a_warning(tmp_path, capsys):
    for loss in ("all", "answers"):
        make_run(tmp_path / loss, [val(1, 3.0)], {"dataset_dir": loss, "data": {"loss": loss}, "seed": 1})
    write_report([tmp_path], None)
    assert "runs differ in dataset_dir and data.loss: losses of other validation tokens" in capsys.readouterr().err


def test_runs_of_several_folders_are_compared_where_they_meet(sweep, tmp_path):
    make_run(tmp_path / "other", [val(1, 9.0)], {"seed": 3})
    page = write_report([sweep, tmp_path / "other", sweep], None)
    assert page == tmp_path / "report.html"
    assert [row["folder"] for row in Page(page).table][-1] == "other"
    assert len(Page(page).table) == 4


LINES = [
    [],
    [train(1, 4.0)],
    [{"step": 1, "tokens": 64, "event": "skipped", "loss": "nan"}],
    [train(1, 4.0, rate=None), val(1, 0.0)],
    [train(1, 4.0, rate=10**400), val(1, 4.0) | {"val_bits_per_byte": [10]}],
    [train(i, 1e38 / i) for i in range(1, 3000)] + [val(i, 1e38 / i) for i in range(1, 9)],
]
CONFIGS = [{"n": 1}, None, [], "x", {"a": {"b": [1, {"c": HOSTILE}]}}, {str(i): i for i in range(1000)}]


@pytest.mark.parametrize(("lines", "config"), zip(LINES, CONFIGS, strict=True))
@pytest.mark.slow
def test_any_lines_and_settings_make_a_report(tmp_path, lines, config):
    make_run(tmp_path / "a", lines, config)
    make_run(tmp_path / "b", [val(1, 3.0), val(2, 2.0)], {"seed": 2})
    assert len(Page(write_report([tmp_path], None)).table) == 2


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
    is_left_out = name == "metrics.jsonl" and not path.is_file()
    assert len(read_runs([tmp_path])) == 2 - is_left_out
    assert capsys.readouterr().err.count("warning: ") == 1


def test_failed_runs_are_named_with_the_last_line_of_their_error(sweep, capsys):
    begun = sweep / "optim.max_lr=9"
    make_run(begun, [train(1, 9.0)], {"max_steps": 6, "seed": 1, "optim": {"max_lr": 9}})
    (begun / "error.txt").write_text("step 2: loss is nan\n")
    never = sweep / "optim.max_lr=99"
    never.mkdir()
    (never / "error.txt").write_text("Traceback\nout of memory\n")
    table = Page(write_report([sweep], None)).table
    failures = {"optim.max_lr=9": "step 2: loss is nan", "optim.max_lr=99": "out of memory"}
    assert {row["folder"]: row["failed"] for row in table if row["failed"]} == failures
    assert capsys.readouterr().err == "".join(f"warning: {name} failed: {why}\n" for name, why in failures.items())


def test_links_lead_nowhere(sweep, tmp_path):
    (sweep / "again").symlink_to(sweep)
    (sweep / "elsewhere").symlink_to(make_run(tmp_path / "private", [val(1, 1.0)]))
    assert len(read_runs([sweep])) == 6


@pytest.mark.parametrize("given", ["empty", "missing", "file", "[]"])
def test_without_a_run_there_is_one_line(command, tmp_path, monkeypatch, given):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert_one_line(command("scripts/report", f"folders={given}"), given)


def test_a_folder_without_a_run_beside_others_is_a_warning(tmp_path, capsys):
    run = make_run(tmp_path / "run", [val(1, 3.0)])
    (tmp_path / "empty").mkdir()
    read_runs([run, tmp_path / "empty"])
    assert capsys.readouterr().err.startswith(f"warning: no run in {tmp_path / 'empty'}: a run has")


def test_torch_is_not_imported(run_process):
    run_process(["-c", "import sys, tools.report; sys.exit('torch' in sys.modules)"])


@pytest.fixture
def hostile(tmp_path):
    """A sweep whose every name and setting tries to be HTML, a formula or a command to the terminal."""
    name = HOSTILE.replace("/", "|") + os.fsdecode(b"\xff")
    for i in range(3):
        optim = {HOSTILE: f"{i}{HOSTILE}", "max_lr": i + 1}
        config = {"optim": optim, "__proto__": {"constructor": i}, "seed": HOSTILE * (i + 1)}
        make_run(tmp_path / "hostile" / f"{name}{i}", [train(1, 4.0), val(1, 3.0 + i), val(2, 2.0 + i)], config)
    return tmp_path / "hostile"


def test_names_and_settings_stay_text(hostile, sweep, capsys):
    assert len(find_varying(read_runs([hostile]))) == 4
    path = write_report([hostile], None)
    page = Page(path)
    harmless = Page(write_report([sweep], None))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in harmless.tags}
    assert len(page.tags) - sum(map(len, page.rows)) == len(harmless.tags) - sum(map(len, harmless.rows))
    assert any("{title}" in value for value in page.table[0].values())
    assert "\x1b" not in path.read_text(encoding="utf-8") + capsys.readouterr().out
