"""The published model: its weights give its logits, loss and gradients."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.settings import UserError
from model.gpt import GPT
from model.interop import load_published, published_config, published_name

GOLDEN = Path(__file__).parents[1] / "golden" / "published_model.safetensors"


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_logits_loss_and_every_gradient_are_the_published(golden, dtype, tolerance):
    gpt = load_published(GOLDEN).to(dtype)
    torch.testing.assert_close(gpt(golden["token_ids"]).double(), golden["logits"], rtol=0, atol=tolerance)
    loss = gpt.loss(golden["token_ids"], golden["targets"])
    assert abs(loss.item() - golden["loss"].item()) <= tolerance
    loss.backward()
    gradients = {published_name(name): p.grad.double() for name, p in gpt.named_parameters()}
    assert {f"grads/{name}" for name in gradients} == {name for name in golden if name.startswith("grads/")}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, golden[f"grads/{name}"], rtol=0, atol=tolerance)


def test_a_published_model_comes_in_the_dtype_of_the_file():
    assert {p.dtype for p in load_published(GOLDEN).parameters()} == {torch.float64}


def test_the_published_model_has_the_published_size():
    with torch.device("meta"):
        gpt = GPT(published_config(vocab_sz=50304, d_emb=768, n_layers=24, n_heads=24, d_key=32, d_val=32))
    assert gpt.n_params() == 124_879_872


def test_what_is_not_the_published_model_is_refused(tmp_path, golden):
    sizes = {"vocab_sz": 512, "d_emb": 64, "n_layers": 3, "n_heads": 4, "d_key": 16, "d_val": 24}
    weights = {name: value for name, value in golden.items() if name.startswith("weights/")}

    def written(tensors, config):
        save_file(tensors, tmp_path / "x.safetensors", {"config": json.dumps(config)})
        return tmp_path / "x.safetensors"

    n_params = sum(w.numel() for w in weights.values())
    assert load_published(written(weights, sizes | {"author": "someone"})).n_params() == n_params
    with pytest.raises(UserError, match="do not match the architecture"):
        load_published(written(weights, sizes | {"n_layers": 4}))
    with pytest.raises(UserError, match="lacks d_key"):
        load_published(written(weights, {k: v for k, v in sizes.items() if k != "d_key"}))
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="cannot read published weights"):
        load_published(tmp_path / "x.safetensors")
