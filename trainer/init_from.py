"""Weights of another run, from which a new run starts: init_from."""

from pathlib import Path

import torch
from torch import Tensor

from common.command_line import format_changes
from common.console import say
from common.settings import UserError, find_differences
from data.tokenizers.build import Tokenizer, load_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import MODEL_FILES, Checkpoint, load_weights, open_checkpoint
from runtime.distributed import World

_BY_ID = ("embed.weight", "output.weight")
"""Parameters with a row for each id."""


def open_init_from(
    path: Path, config: GPTConfig, tokenizer: Tokenizer
) -> tuple[Checkpoint, Tokenizer]:
    """Open the checkpoint init_from=path, for a run with this model and tokenizer.

    The tokenizer may have markers that the checkpoint's tokenizer lacks. Their rows of the
    embedding are padding rows of the checkpoint, or new rows by another model.pad_vocab.

    Returns:
        The checkpoint and its tokenizer.

    Raises:
        UserError: there is no whole checkpoint, or it has another model or tokenizer.
    """
    # Its tokenizer must be the run's, or the run's without markers.
    source = open_checkpoint(path, MODEL_FILES, key="init_from")
    trained = load_tokenizer(source.path / "tokenizer.json")
    if not tokenizer.extends(trained.sha256):
        mismatch = f"init_from={path} was trained with the tokenizer {_described(trained)}"
        remedy = "prepare the dataset with the model's tokenizer"
        if trained.extends(tokenizer.sha256):
            remedy = "a chat model goes on with data=chat"
        raise UserError(f"{mismatch}, and the dataset has {_described(tokenizer)}: {remedy}")
    # New markers may need more rows of the embedding. All other settings of the model must be
    # equal.
    model = source.state.model
    run_settings = config.model_dump(mode="json")
    source_settings = model.model_dump(mode="json")
    if tokenizer.n_vocab > trained.n_vocab:
        if tokenizer.n_vocab > model.n_vocab_padded and config.pad_vocab == model.pad_vocab:
            raise UserError(
                f"init_from={path} has rows for {model.n_vocab_padded} ids, and the dataset has "
                f"{tokenizer.n_vocab}, with its markers: "
                f"add rows by model.pad_vocab={max(64, 2 * model.pad_vocab)}"
            )
        if config.n_vocab_padded >= model.n_vocab_padded:
            source_settings |= {key: run_settings[key] for key in ("n_vocab", "pad_vocab")}
    changed = find_differences({"model": run_settings}, {"model": source_settings})
    if changed:
        listed = ", ".join(format_changes(changed, "here:"))
        raise UserError(
            f"init_from={path} has another model: {listed}; leave out the model and its settings: "
            "they are those of init_from"
        )
    return source, trained


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name} (n_vocab {tokenizer.n_vocab})"


def load_init_from(gpt: GPT, path: Path, tokenizer: Tokenizer, world: World) -> None:
    """Load the weights of the checkpoint init_from=path into a model.

    Raises:
        UserError: as `open_init_from`; or the processes do not all find the same checkpoint.
    """
    source, trained = open_init_from(path, gpt.config, tokenizer)
    with torch.device("meta"):
        source_gpt = GPT(source.state.model)
    weights = gpt.state_dict()
    rows = world.rows(weights)
    world.check_equal({"the weights of init_from": source.identity})
    rows_to_read = {name: shard for name, shard in rows.items() if name not in _BY_ID}
    stored = load_weights(source, source_gpt, rows=rows_to_read)
    with torch.no_grad():
        for name, value in weights.items():
            loaded = stored[name]
            if name in _BY_ID:
                table = _extended(loaded, trained.n_vocab, tokenizer.n_vocab, len(value))
                loaded = table[rows.get(name, slice(None))]
            world.local(value).copy_(loaded)
    say(f"starting from the weights of {source.path}")


def _extended(table: Tensor, n_trained: int, n_ids: int, n_rows: int) -> Tensor:
    """Return a table (rows, n_embd) with n_rows rows.

    Rows of ids from n_trained to n_ids, and added rows, are the mean of the trained ones, so their
    logits are the mean of all logits (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Rows that pad the table stay.
    """
    trained = table[:n_trained]
    padding = table[n_ids:]
    n_new_ids = n_ids - n_trained
    mean = trained.mean(0, keepdim=True)
    new = mean.expand(n_rows - n_trained - len(padding), -1)
    return torch.cat([trained, new[:n_new_ids], padding, new[n_new_ids:]])
