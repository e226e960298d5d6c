"""The config.json of an exported model, for transformers' AutoConfig."""

from typing import Any

from transformers import PretrainedConfig


class LogGPTConfig(PretrainedConfig):
    """`architecture` holds a GPTConfig as plain data; `sizes` repeats what other programs look for.

    `document_start` is the id of the token that starts a document; a document does not see earlier
    documents.
    """

    model_type = "log_gpt"

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        document_start: int | None = None,
        use_cache: bool = True,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.document_start = document_start
        self.architecture = architecture or {}
        self.use_cache = use_cache
