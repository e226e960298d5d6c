"""Checkpoints are whole or absent, verified, and complete."""

import os

import pytest
import torch
from safetensors.torch import load_file

from data.tokenizers.build import load_tokenizer
from model.gpt import GPT
from runtime.checkpoint import MODEL_FILES, find_newest, load_model, open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def run_dir(run_of):
    """A run of 6 steps: checkpoints after 4 and 6, the best after 6."""
    return run_of()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_modes_that_the_umask_gives(tiny, umask):
    before = os.umask(umask)
    try:
        fit(tiny({"max_steps": 2}))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tiny().run_dir.rglob("*") if path.is_file()}
    assert {name: oct(mode) for name, mode in modes.items()} == dict.fromkeys(modes, oct(0o666 & ~umask))


def test_run_directory_folder_and_pointers_all_lead_to_the_checkpoint(run_dir, monkeypatch):
    folder = run_dir / "checkpoints"
    (folder / "best").write_text("step-00000004\n")
    for path, step in [
        (run_dir, 6),
        (str(run_dir), 6),
        (folder / "step-00000004", 4),
        (folder / "latest", 6),
        (folder / "best", 4),
    ]:
        checkpoint = open_checkpoint(path)
        assert (checkpoint.state.step, checkpoint.run_dir) == (step, run_dir)
    monkeypatch.chdir(folder)
    assert open_checkpoint("step-00000004").run_dir == run_dir
    assert open_checkpoint("latest").run_dir == run_dir


def test_load_model_gives_the_stored_weights_logits(run_dir, tiny, dataset_dir):
    path = find_newest(run_dir)
    direct = GPT(tiny().model)
    direct.load_state_dict(load_file(path / "model.safetensors"))
    gpt, tokenizer = load_model(run_dir)
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(gpt(ids), direct(ids))
    assert all(p.requires_grad for p in gpt.parameters())
    assert tokenizer.sha256 == load_tokenizer(dataset_dir / "tokenizer.json").sha256


def test_of_a_model_only_what_it_needs_is_looked_at(run_dir):
    (find_newest(run_dir) / "optimizer.safetensors").unlink()
    assert open_checkpoint(run_dir, MODEL_FILES).state.step == 6
    load_model(run_dir)


def test_a_start_keeps_later_checkpoints_that_cannot_be_read(tiny, run_dir):
    """A disk may recover: only the next save deletes them."""
    (run_dir / "checkpoints" / "best").write_text("step-00000004\n")
    weights = find_newest(run_dir) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    fit(tiny({"run_dir": str(run_dir), "stop_at": 4}))
    assert weights.exists()
    fit(tiny({"run_dir": str(run_dir)}))
    open_checkpoint(find_newest(run_dir))
