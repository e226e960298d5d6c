"""Learning a vocabulary from a dataset: byte-level BPE, in a tokenizer.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tokenizers
from pydantic import Field
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.console import say
from common.files import new_directory, write_atomic
from common.settings import UserError
from data.document_index import find_documents
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizers.build import load_tokenizer
from data.tokenizers.hugging_face import HFTokenizer
from data.tokenizers.interface import END_OF_TEXT, map_bytes


def learn_vocabulary(
    dataset_dir: Path, n_vocab: Annotated[int, Field(lt=2**24)], out: Path
) -> None:
    """Learn a byte-level BPE of `n_vocab` ids from a dataset, and write its tokenizer.json.

    It learns from the training documents. GPT-2's pattern splits texts into words. <|endoftext|> is
    the last id.

    Raises:
        UserError: there is no such dataset, n_vocab is less than 257 or more than its text gives,
            the folder of `out` cannot be made, or `out` exists.
    """
    manifest = read_manifest(dataset_dir)
    alphabet = sorted(map_bytes().values())
    if n_vocab <= len(alphabet):
        raise UserError(
            f"n_vocab={n_vocab} is too small: the bytes and {END_OF_TEXT} alone are "
            f"{len(alphabet) + 1}"
        )
    with new_directory(out.parent, "out"):  # learning takes long: an error must come before it
        if out.exists():
            raise UserError(f"out={out} exists: choose another file, or delete it")
        # Words of GPT-2's pattern, from the characters of all bytes. The end of text is added last.
        bpe = tokenizers.Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator(_texts(dataset_dir, manifest), trainer)
        bpe.add_special_tokens([END_OF_TEXT])
        # A small text has fewer pairs than were asked for.
        n_learned = bpe.get_vocab_size()
        if n_learned < n_vocab:
            raise UserError(
                f"n_vocab={n_vocab} is more than the text of {dataset_dir} gives: "
                f"use at most n_vocab={n_learned}"
            )
        HFTokenizer(json.loads(bpe.to_str()))  # raises if it could not be used
        write_atomic(out, bpe.to_str(pretty=True) + "\n")
        say(f"{out} has {n_learned:,} ids; prepare data with: tokenizer=hf tokenizer.path={out}")


def _texts(dataset_dir: Path, manifest: Manifest) -> Iterator[str]:
    stream = TokenStream(dataset_dir, manifest, "train")
    tokenizer = load_tokenizer(dataset_dir / TOKENIZER)
    for document in find_documents(stream, 0, stream.n_tokens):
        ids = stream.read(document.start, document.stop - 1).tolist()
        yield tokenizer.decode_bytes(ids).decode(errors="replace")
