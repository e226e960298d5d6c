"""Loads exported folders in transformers, in a process that cannot import our modules.

hf_process.py WORK reads WORK/input.safetensors, WORK/prompts/*.safetensors and WORK/exports/*/model, and writes
WORK/results/*.safetensors, WORK/said.json and WORK/gpt2, a GPT-2 of transformers' own.
"""

import json
import pickle
import sys
from pathlib import Path

# Who imports these now gets an ImportError.
sys.modules |= dict.fromkeys(("common", "data", "model", "runtime", "trainer"))

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel  # noqa: E402


@torch.no_grad()
def results_of(model, token_ids, prompts):
    """Everything by which a model may differ from the one that was exported."""
    options = {"max_new_tokens": 8, "do_sample": False}
    left, right = [0, 0, 0], [0] * 9  # padding of two of the three texts
    B, T = token_ids.shape
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, : len(left)] = 0
    both = mask.clone()
    both[2, -len(right) :] = 0
    state, pieces = None, []
    for piece in token_ids.split([5, 1, 1, T - 7], dim=1):
        out = model(piece, past_key_values=state, use_cache=True)
        state, pieces = out.past_key_values, [*pieces, out.logits]
    prompt = {"input_ids": token_ids[:, :20], "attention_mask": mask[:, :20]}
    first = model.generate(**prompt, **options, return_dict_in_generate=True)
    more = torch.cat([prompt["attention_mask"], torch.ones(B, 8, dtype=torch.long)], 1)
    of_prompts = {
        f"{name}, {use_cache=}": model.generate(**batch, **options, use_cache=use_cache)
        for name, batch in prompts.items()
        for use_cache in (True, False)
    }
    features = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    by_trl = features @ model.get_output_embeddings().weight.T  # of the output layer's input, in pieces
    cap = getattr(model.config, "final_logit_softcapping", None)
    return of_prompts | {
        "logits": model(token_ids).logits,
        "of_base_model": by_trl if cap is None else cap * torch.tanh(by_trl / cap),
        "in_pieces": torch.cat(pieces, dim=1),
        "last": model(token_ids, logits_to_keep=2).logits,
        "padded": model(token_ids, attention_mask=both).logits,
        "padded_behind": model(token_ids, attention_mask=both[2:].expand(B, -1), use_cache=False).logits,
        "loss": dict(enumerate(model(token_ids, labels=token_ids, return_dict=False)))[0],
        "generated": first.sequences,
        "generated_without_cache": model.generate(**prompt, **options, use_cache=False),
        "continued": model.generate(
            first.sequences, attention_mask=more, past_key_values=first.past_key_values, **options
        ),
        "beams": model.generate(**prompt, **options, num_beams=3),
        "beams_without_cache": model.generate(**prompt, **options, num_beams=3, use_cache=False),
    }


def finetuned(folder, token_ids):
    """Logits and gradients of adapters in place of all linear layers; with activations that are computed again, too."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).train()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)
    results = {}
    for checkpointing in (False, True):
        if checkpointing:
            adapted.gradient_checkpointing_enable()
        adapted(token_ids, labels=token_ids).loss.backward()
        for name, parameter in trained.items():
            results[f"{checkpointing=}, {name}"], parameter.grad = parameter.grad, None
    results["adapted"] = adapted.eval()(token_ids).logits
    results["merged"] = adapted.merge_and_unload()(token_ids).logits
    return {name: value.detach() for name, value in results.items()}


def write_gpt2(path, token_ids):
    """A GPT2LMHeadModel built by transformers, with tensors far from 0, and its logits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=24, n_layer=2, n_head=3, n_inner=48)
    model = GPT2LMHeadModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    save_file({"logits": model(token_ids).logits.detach()}, path / "logits.safetensors")


def main(work):
    """Write results, the names of the classes, and what a tokenizer gives."""
    token_ids = load_file(work / "input.safetensors")["token_ids"]
    prompts = {path.stem: load_file(path) for path in (work / "prompts").iterdir()}
    classes = {}
    for folder in sorted((work / "exports").glob("*/model")):  # of one name, and so their code is imported once
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        results = results_of(pickle.loads(pickle.dumps(model)), token_ids, prompts)
        if type(model).__name__ == "LogGPTForCausalLM":
            results |= finetuned(folder, token_ids)
        save_file(
            {name: value.contiguous() for name, value in results.items()},
            work / "results" / f"{folder.parent.name}.safetensors",
        )
        classes[folder.parent.name] = type(model).__name__
    model.save_pretrained(work / "again")
    again = AutoModelForCausalLM.from_pretrained(work / "again", trust_remote_code=True)
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = "déjà vu\n  日本 🙂 <|endoftext|>"
    ids = tokenizer(["a", text], padding=True)
    said = {"classes": classes, "text": text, "ids": ids["input_ids"], "mask": ids["attention_mask"]}
    (work / "said.json").write_text(json.dumps(said | {"decoded": tokenizer.decode(ids["input_ids"][1])}))
    write_gpt2(work / "gpt2", token_ids)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
