"""The GPT as a model for transformers' AutoModelForCausalLM.

An exported folder contains copies of this file and of all modules that it imports. `generate` uses
our state as cache.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from common.settings import decode
from model.config import GPTConfig
from model.gpt import GPT, GPTState
from model.state_trees import cat_states, select_rows
from tools.convert.hugging_face.configuration_log_gpt import LogGPTConfig


class GPTCache:
    """The cache that `generate` passes along: the model's state after all tokens so far, for any
    mechanism."""

    is_compileable = False
    is_croppable = False  # a state cannot forget its last tokens

    def __init__(self) -> None:
        self.state: GPTState | None = None
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows that beam search selected."""
        self.state = select_rows(self.state, beam_idx.tolist())


class LogGPTModel(GPT):
    """The GPT up to its output layer, in the form that transformers calls a base model."""

    gradient_checkpointing = False  # `gradient_checkpointing_enable` sets it

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GPTCache | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """Return the output layer's input (B, T, n_embd), and the cache if `use_cache`."""
        for key in ("output_hidden_states", "output_attentions"):
            if options.get(key):
                raise ValueError(
                    f"{key}=True: this model returns logits and its cache only; leave it out"
                )
        if input_ids is None or not isinstance(past_key_values, GPTCache | None):
            raise ValueError(
                "this model reads input_ids and its own cache: tune it by LoRA, not by prompts "
                "or prefixes"
            )
        self.recompute = "block" if self.gradient_checkpointing and not use_cache else "none"
        cache = past_key_values if past_key_values is not None else GPTCache()
        T = input_ids.shape[1]
        present = None if attention_mask is None else attention_mask[:, -T:].bool()
        x, state = self._read(input_ids, present, cache.state, use_cache)
        if not use_cache:
            return BaseModelOutputWithPast(last_hidden_state=x)
        cache.state = state
        cache.length += T
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache)

    def _read(
        self, input_ids: Tensor, present: Tensor | None, state: GPTState | None, return_state: bool
    ) -> tuple[Tensor, GPTState | None]:
        """Return the output layer's input (B, T, n_embd) and the state. Padding does not influence
        them.

        Padding after a text gets the features of the text's last token, because `generate` reads
        the last column.
        """
        if present is None or bool(present.all()):
            return self.features(input_ids, state, return_state)
        if not present.any(1).all():
            raise ValueError(
                "a row of attention_mask has no token: give it at least one, such as bos_token"
            )
        if return_state or bool((present[:, 1:] > present[:, :-1]).any()):
            x, state = self._read_row_by_row(input_ids, present, state, return_state)
        else:  # padding comes only after the texts, which cannot attend to it
            x, state = self.features(input_ids, state, return_state)
        places = torch.arange(present.shape[1], device=x.device)
        last_token = torch.where(present, places, 0).cummax(1).values
        rows = torch.arange(len(x), device=x.device)
        return x[rows.unsqueeze(1), last_token], state

    def _read_row_by_row(
        self, input_ids: Tensor, present: Tensor, state: GPTState | None, return_state: bool
    ) -> tuple[Tensor, GPTState | None]:
        """Read each row without its padding, which gets zeros as features."""
        rows = [
            self.features(input_ids[b, tokens].unsqueeze(0), select_rows(state, [b]), return_state)
            for b, tokens in enumerate(present)
        ]
        x = torch.cat([x[0] for x, _ in rows])  # (tokens without padding, n_embd)
        padded = x.new_zeros(*input_ids.shape, x.shape[-1])
        padded[present] = x
        return padded, cat_states([state for _, state in rows]) if return_state else None


class LogGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """Any GPT of ours as a causal language model."""

    config_class = LogGPTConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _is_stateful = True

    def __init__(self, config: LogGPTConfig) -> None:
        super().__init__(config)
        self.gpt = LogGPTModel(decode(GPTConfig, config.architecture), config.document_start)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing: GPT initialises its own weights."""

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the token embeddings, which may also be the output layer."""
        return self.gpt.embed

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the token embeddings."""
        self.gpt.embed = value

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the output layer, which may also be the embeddings."""
        layer = self.gpt.embed if self.gpt.config.tied else self.gpt.output
        layer.register_parameter("bias", None)  # trl reads it, and embeddings have none
        return layer

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the output layer."""
        self.gpt.output = new_embeddings

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> torch.nn.Embedding:
        """As in other models; the architecture in config.json follows."""
        embed = super().resize_token_embeddings(*sizes, **options)
        n_vocab = len(embed.weight)
        self.gpt.config = self.gpt.config.model_copy(update={"n_vocab": n_vocab})
        self.config.architecture = self.config.architecture | {"n_vocab": n_vocab}
        return embed

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates a GPTCache

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GPTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits (B, T, n_vocab), the cache if `use_cache`, and the mean loss if there
        are `labels`.

        Args:
            attention_mask: (B, T), or (B, n + T) after n earlier tokens: 0 where there is padding,
                on either side.
            past_key_values: cache from an earlier call. This call updates it, unless `use_cache` is
                False.
            labels: (B, T), usually input_ids: they are shifted here. -100 is ignored.
            logits_to_keep: return logits of this many last tokens only, or of these positions; 0:
                of all.
        """
        # Options that are not given come from the config.
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        for key in ("output_hidden_states", "output_attentions"):
            options.setdefault(key, getattr(self.config, key, False))
        # Logits are computed only where they are asked for.
        output = self.gpt(input_ids, attention_mask, past_key_values, use_cache, **options)
        places: Any = logits_to_keep
        if isinstance(places, int):
            places = slice(-places, None)
        logits = self.gpt.logits(output.last_hidden_state[:, places])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **options
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values
        )
