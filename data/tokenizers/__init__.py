"""Text to token ids and back.

`interface`     What every tokenizer has, and where a long text is cut.
`build`         Builds `bytes`, `gpt2` and `ids`; saves and loads any tokenizer as one JSON file.
`hugging_face`  Any byte-level BPE of Hugging Face's tokenizers.
`chat`          Adds the markers of conversations, and tells which tokens are targets.
"""
