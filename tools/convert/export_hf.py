"""From a checkpoint to a folder for Hugging Face's transformers.

A model of GPT-2's architecture becomes a plain GPT2LMHeadModel. Any other model includes its code:
copies of our modules, which transformers runs with trust_remote_code=True. Neither needs log-gpt.
"""

import os
import shutil
from pathlib import Path

from torch import Tensor

from common.console import say
from common.files import hold_lock, make_directory, write_json
from common.settings import JsonDict, UserError, decode
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer
from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import MODEL_FILES, load_model, open_checkpoint
from runtime.state import TrainState
from runtime.tensor_file import save_file
from tools.convert.hf_tokenizer import tokenizer_files
from tools.convert.hugging_face.exported_code import CONFIG_CLASS, MODEL_CLASS, collect_sources
from tools.convert.hugging_face.gpt2 import (
    PREFIX,
    gpt2_config,
    is_gpt2,
    name_in_gpt2,
    transpose_weight,
)

_HERE = Path(__file__).resolve().parent


def export_checkpoint(checkpoint: Path, out_dir: Path) -> None:
    """Write the whole folder, or nothing.

    Raises:
        UserError: there is no whole checkpoint, or out_dir is in use.
    """
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists and is not empty: choose another folder, or remove it")
    opened = open_checkpoint(checkpoint, MODEL_FILES)
    gpt, tokenizer = load_model(opened)
    temp_dir = out_dir.absolute().with_name(f".{out_dir.absolute().name}.export")
    make_directory(temp_dir, "out_dir")
    refusal = f"out_dir={out_dir} is being written by another process: choose another folder"
    with hold_lock(temp_dir, lambda: refusal):
        try:
            for leftover in temp_dir.iterdir():  # of an export that was killed
                leftover.unlink()
            plain = _write_model(gpt, tokenizer, temp_dir)
            for name, content in tokenizer_files(tokenizer, gpt.config.max_len).items():
                write_json(temp_dir / name, content)
            card = _card(gpt, tokenizer, opened.state, plain)
            (temp_dir / "README.md").write_text(card, encoding="utf-8")
            os.rename(temp_dir, out_dir)
        finally:
            shutil.rmtree(temp_dir, ignore_errors=True)
    kind = "a GPT2LMHeadModel" if plain else "a model with its own code"
    say(f"written to {out_dir}: {kind} (see README.md there)")


def _write_model(gpt: GPT, tokenizer: Tokenizer, folder: Path) -> bool:
    """Write weights, configuration, and code if transformers does not have this model.

    Returns:
        Whether transformers has it.
    """
    config, tensors = _without_padding(gpt, tokenizer.n_vocab)
    plain = is_gpt2(config) and gpt.eot_id is None  # GPT-2's documents see each other
    if plain:
        tensors = {
            PREFIX + name_in_gpt2(name): transpose_weight(name_in_gpt2(name), value)
            for name, value in tensors.items()
        }
    else:
        tensors = {f"gpt.{name}": value for name, value in tensors.items()}
        for name, text in collect_sources(map(type, [config.attention, *config.layers])).items():
            (folder / name).write_text(text, encoding="utf-8")
        shutil.copyfile(_HERE.parents[1] / "LICENSE", folder / "LICENSE-code")
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},  # transformers refuses a file without it
    )
    ids = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id}
    dtype = {"dtype": str(gpt.embed.weight.dtype).removeprefix("torch.")}
    architecture = gpt2_config(config) if plain else _own_config(config, gpt.eot_id)
    write_json(folder / "config.json", architecture | ids | dtype)
    ends = {"eos_token_id": [*tokenizer.end_ids]} if isinstance(tokenizer, ChatTokenizer) else {}
    write_json(folder / "generation_config.json", ids | ends | {"pad_token_id": tokenizer.eot_id})
    return plain


def _without_padding(gpt: GPT, n_vocab: int) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Return the model without the padding rows of its embedding.

    Other programs would sample them.
    """
    config = decode(GPTConfig, gpt.config.model_dump() | {"n_vocab": n_vocab, "pad_vocab": 1})
    tensors = gpt.state_dict()
    for name in ("embed.weight", "output.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:n_vocab]
    return config, tensors


def _own_config(config: GPTConfig, document_start: int | None) -> JsonDict:
    """Return config.json for a model with its own code.

    It holds the architecture, and keys that other programs look for.
    """
    limit = {} if config.max_len is None else {"max_position_embeddings": config.max_len}
    return {
        "model_type": "log_gpt",
        "architectures": [MODEL_CLASS.rpartition(".")[2]],
        "auto_map": {"AutoConfig": CONFIG_CLASS, "AutoModelForCausalLM": MODEL_CLASS},
        "vocab_size": config.n_vocab,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        **limit,
        "tie_word_embeddings": config.tied,
        "final_logit_softcapping": config.logit_cap,
        "architecture": config.model_dump(mode="json"),
        "document_start": document_start,
    }


def _card(gpt: GPT, tokenizer: Tokenizer, state: TrainState, plain: bool) -> str:
    """Return README.md: what the model is, as far as its run knows."""
    config = gpt.config
    kind = "chat" if isinstance(tokenizer, ChatTokenizer) else "text"
    example = (_HERE / f"model_card_{kind}.md").read_text(encoding="utf-8")
    return (
        (_HERE / "model_card.md")
        .read_text(encoding="utf-8")
        .replace("{example}", example)
        .format(
            attention=" and ".join(dict.fromkeys(layer.name for layer in config.layers)),
            size=gpt.size(tokenizer.n_vocab),
            config=config,
            length="any length" if config.max_len is None else f"up to {config.max_len:,} tokens",
            tokenizer=tokenizer,
            training=_training(state),
            trust="" if plain else ", trust_remote_code=True",
            end=tokenizer.tokens[tokenizer.eot_id].decode(),
            code="" if plain else (_HERE / "model_card_code.md").read_text(encoding="utf-8"),
        )
    )


def _training(state: TrainState) -> str:
    if state.step == 0:
        return "not trained since it was made or imported"
    return (
        f"trained for {state.step:,} steps of {state.batch_tokens:,} tokens, in sequences of "
        f"{state.seq_len:,}, on `{state.dataset_dir.name}`"
    )
