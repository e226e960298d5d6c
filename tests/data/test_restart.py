"""A run that is killed goes on when it is started again, and makes the same bytes as one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.journal import JOURNAL

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
DRIVER = """
import json, sys
import data.assembly, data.encode
from common.settings import decode
from data.prepare import PrepareConfig, prepare
data.assembly._SECONDS_BETWEEN_SAVES = 0.05
data.assembly._SHARE_OF_SAVING = 1.0
data.encode._BATCH_CHARACTERS = 20_000
prepare(decode(PrepareConfig, json.loads(sys.argv[1])))
"""


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def large(tmp_path):
    """40,000 short documents in three files, a tenth of them twice, some unreadable."""
    rng = random.Random(0)
    texts = [f"{i} " + "word " * rng.randrange(40) for i in range(36_000)]
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": f"set {i % 5}"}}) for i, text in enumerate(texts)]
    lines += rng.sample(lines, 4000) + ["{", '{"text": ""}', '{"text": 3}'] * 5
    rng.shuffle(lines)
    for part in range(3):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines[part::3]) + "\n")
    return {
        "data": {"name": "jsonl", "path": str(tmp_path / "*.jsonl")},
        "tokenizer": {"name": "bytes"},
        "val_fraction": 0.1,
        "shard_tokens": 400_000,
        "dedup": "exact",
    }


def start(raw, out_dir, workers):
    settings = json.dumps({**raw, "out_dir": str(out_dir), "workers": workers})
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, settings],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out.decode()


def test_killed_at_random_moments_the_bytes_are_the_same(large, tmp_path):
    """The whole tree of processes is killed, of one worker or two; some kills hit the start, most hit the writing."""
    finish(start(large, tmp_path / "undisturbed", 2))
    expected = contents(tmp_path / "undisturbed")
    assert len(expected) > 20
    rng, out, journal = random.Random(0), tmp_path / "out", tmp_path / "out.partial" / JOURNAL
    kills = places = 0
    while kills < KILLS:
        if out.exists():
            assert contents(out) == expected
            (out).rename(tmp_path / f"finished after {kills} kills")
        process = start(large, out, rng.choice([1, 2]))
        if rng.random() < 0.9:
            wait_for_a_save(process, journal)
        time.sleep(rng.uniform(0, 0.4))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
            places += journal.exists()
        process.communicate()
    finish(start(large, out, 2))
    assert contents(out) == expected
    assert not (tmp_path / "out.partial").exists()
    assert places > KILLS / 2, "most kills leave something to go on from"


def wait_for_a_save(process, journal):
    def saved():
        try:
            return journal.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    before = saved()
    while process.poll() is None and saved() == before:
        time.sleep(0.005)
