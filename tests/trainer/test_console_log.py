"""run_dir/console.log holds what a run prints, and nothing else is written there."""

import pytest
import ranks
from ranks import IN_STEP

from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


def lines_of(result):
    """What a command printed on either stream, in any order."""
    return sorted((result.out + result.err).splitlines())


def test_the_log_has_all_lines_of_a_run_and_of_the_next(command, tiny_args, tmp_path):
    log = tmp_path / "run" / "console.log"
    first = command("train", *tiny_args, "stop_at=4")
    assert sorted(log.read_text().splitlines()) == lines_of(first)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    second = command("train", *tiny_args)
    assert "resuming" in second.out
    assert "the metrics of steps 1 to 4 are lost" in second.err
    assert sorted(log.read_text().splitlines()) == sorted(lines_of(first) + lines_of(second))


def test_an_error_that_ends_a_run_is_logged(command, tiny_args, tmp_path):
    result = command("train", *tiny_args, "optim.max_lr=1e30", "optim.grad_clip=null")
    assert result.status == 1
    assert (tmp_path / "run" / "console.log").read_text().splitlines()[-1] == result.err.splitlines()[-1]


def test_a_run_that_is_refused_writes_no_log(command, tiny_args, dataset_dir):
    before = sorted(dataset_dir.iterdir())
    assert command("train", *tiny_args, f"run_dir={dataset_dir}").status != 0
    assert sorted(dataset_dir.iterdir()) == before


def test_a_link_in_place_of_the_log_leads_nowhere(tiny, tmp_path):
    private = tmp_path / "private"
    private.write_text("mine")
    fit(tiny({"stop_at": 2}))
    (tmp_path / "run" / "console.log").unlink()
    (tmp_path / "run" / "console.log").symlink_to(private)
    fit(tiny())
    assert private.read_text() == "mine"


@pytest.mark.slow
def test_several_processes_and_their_parent_share_a_log(tiny_args, tmp_path):
    dies = IN_STEP.format(when="(step, rank) == (3, 1)", fault="os.kill(os.getpid(), 9)")
    end = ranks.run_alone("-c", dies, *tiny_args, "runtime.processes=2")
    log = (tmp_path / "run" / "console.log").read_text()
    assert sorted(log.splitlines()) == lines_of(end)
    assert log.count("was ended by SIGKILL") == 1
