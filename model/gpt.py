"""The GPT: token embeddings, n-grams, positions, residual blocks, and the embeddings again as
output layer."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from model.attention.base import Attention
from model.blocks import BLOCKS
from model.config import GPTConfig
from model.layers import Embedding, Linear, Recompute
from model.ngram_memory import NGramMemory
from model.ops.linear_cross_entropy import capped, summed_loss, token_losses
from model.ops.ngrams import NGramState
from model.position import Positions
from model.state_trees import cat_states, select_rows


class GPTState(NamedTuple):
    """What a model remembers of the tokens so far: pass it together with the next tokens."""

    position: Any
    layers: tuple[Any, ...]
    ngrams: NGramState | None = None


class GPT(nn.Module):
    """A GPT language model. `state_dict()` holds only parameters; state is passed and returned."""

    def __init__(self, config: GPTConfig, eot_id: int | None = None) -> None:
        """Create the model.

        Args:
            eot_id: the token that starts a document. Its tokens do not see earlier documents. None:
                all tokens see each other.

        Raises:
            ValueError: attention cannot keep documents apart.
        """
        super().__init__()
        if eot_id is not None:
            config.check_documents()
        self.config = config
        self.eot_id = eot_id
        self.recompute: Recompute = "none"
        """What a backward pass computes again instead of keeping it: of blocks, and of reading the
        n-grams' memory."""
        # Lay out all modules without memory. Their order is that of weights in checkpoints.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.embed = Embedding(config.n_vocab_padded, config.n_embd)
            self.position: Any = config.position.build(config.n_embd, config.head_features)
            if config.ngrams:
                self.ngrams = NGramMemory(config.ngrams, config.n_embd)
            self.blocks: Any = nn.ModuleList()
            for layer in config.layers:
                attention = layer.build(config.n_embd, config.n_head, config.head_features)
                self.blocks.append(BLOCKS[config.block.name](config, attention))
            self.norm = config.new_norm()
            if not config.tied:
                self.output = Linear(config.n_embd, config.n_vocab_padded, bias=False)
            # Remove biases, where the configuration has none.
            if not config.bias:
                for module in self.modules():
                    if isinstance(module, nn.Linear | nn.LayerNorm):
                        module.register_parameter("bias", None)
        # Allocate and draw the weights, unless the caller wants none yet.
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(
        self, shard_like: Callable[[Tensor, Tensor], Tensor] = lambda whole, parameter: whole
    ) -> None:
        """Draw the weights with torch's generator of the CPU, in the order of `state_dict()`.

        Args:
            shard_like: (a whole weight, its parameter) -> what this process holds of it, if
                parameters are sharded.
        """
        for module in self.modules():
            parameters = dict(module.named_parameters(recurse=False))
            if not parameters:
                continue
            # Each module draws its own parameters, whole and on the CPU.
            whole = {}
            for name, parameter in parameters.items():
                whole[name] = nn.Parameter(torch.empty(parameter.shape, device="cpu"))
            module._parameters.update(whole)
            cast(Any, module).reset_parameters()
            module._parameters.update(parameters)
            for name, parameter in parameters.items():
                parameter.copy_(shard_like(whole[name], parameter))
        for block in self.blocks:
            block.attention.copy_weights()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed.weight.device

    @property
    def output_weight(self) -> Tensor:
        """(n_vocab_padded, n_embd)."""
        return self.embed.weight if self.config.tied else self.output.weight

    def forward(
        self, token_ids: Tensor, state: GPTState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, GPTState]:
        """(B, T) ids -> (B, T, n_vocab) logits, or (logits, state) with `return_state`.

        `state` is what an earlier call returned for the tokens before these, None at the start of a
        text.
        """
        x, state = self.features(token_ids, state, return_state)
        logits = self.logits(x)
        return (logits, state) if return_state else logits

    def logits(self, x: Tensor) -> Tensor:
        """Output layer: (..., n_embd) -> (..., n_vocab). Padding rows have no logits."""
        logits = x @ self.embed.weight.T if self.config.tied else self.output(x)
        return capped(logits[..., : self.config.n_vocab], self.config.logit_cap)

    def features(
        self,
        token_ids: Tensor,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, GPTState]:
        """Return the output layer's input, (B, T, n_embd), and the state.

        Arguments are those of `forward`. Without `return_state` the returned state is incomplete.

        Raises:
            ValueError: T = 0.
        """
        if token_ids.shape[1] == 0:
            raise ValueError(
                f"token_ids of shape {tuple(token_ids.shape)} contain no tokens: pass at least one"
            )
        starts = None
        if self.eot_id is not None:
            starts = token_ids == self.eot_id
            has_state = state is not None or return_state
            if has_state and not self.config.has_constant_state:
                return self._by_documents(token_ids, starts, state)
        return self._features(token_ids, starts, state, return_state)

    def _features(
        self,
        token_ids: Tensor,
        starts: Tensor | None,
        state: GPTState | None,
        return_state: bool,
    ) -> tuple[Tensor, GPTState]:
        if state is None:
            state = GPTState(None, (None,) * len(self.blocks))
        position, layers, ngrams = state
        x = self.embed(token_ids)  # (B, T, n_embd)
        if self.config.ngrams:
            embed = self.embed.weight
            x, ngrams = self.ngrams(x, ngrams, starts, token_ids, embed, self.recompute)
            if not return_state:
                ngrams = None  # its memory would be held until the loss is computed
        x, rotation, position = self.position(x, position, starts)
        positions = Positions(rotation, starts)
        states = []
        for block, layer_state in zip(self.blocks, layers, strict=True):
            x, layer_state = block(
                x, layer_state, positions, self.recompute, return_state=return_state
            )
            states.append(layer_state)
        return self.norm(x), GPTState(position, tuple(states), ngrams)

    def _by_documents(
        self, token_ids: Tensor, starts: Tensor, state: GPTState | None
    ) -> tuple[Tensor, GPTState]:
        """Compute `features` with a state that grows.

        Rows are computed together if documents start nowhere, or only at the first token of all.
        Otherwise each document of each row is computed by itself.
        """
        # The usual cases: all rows are computed together.
        starts = starts.cpu()
        if not starts.any():
            return self._features(token_ids, None, state, True)
        no_earlier_tokens = state is None or bool(starts[:, 0].all())
        if no_earlier_tokens and not starts[:, 1:].any():
            return self._features(token_ids, None, None, True)
        # Else row by row, and document by document.
        outputs = []
        states = []
        for b, row in enumerate(token_ids.split(1)):
            row_state = None if state is None else select_rows(state, [b])
            rest, *documents = row.tensor_split(starts[b].nonzero().flatten(), dim=1)
            if rest.shape[1]:  # of the document that the state has read
                x, row_state = self._features(rest, None, row_state, True)
                outputs.append(x)
            for document in documents:
                x, row_state = self._features(document, None, None, True)
                outputs.append(x)
            states.append(row_state)
        x = torch.cat(outputs, dim=1).view(*token_ids.shape, -1)
        return x, cat_states(states)

    def token_losses(
        self,
        token_ids: Tensor,
        targets: Tensor,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Cross-entropy of each target in nats, (B, T), float32 or float64; 0 for negative targets.

        With `return_state` also the state: as `forward`.
        """
        x, state = self.features(token_ids, state, return_state)
        config = self.config
        losses = token_losses(
            x.flatten(0, 1), self.output_weight, targets.flatten(), config.logit_cap, config.n_vocab
        )
        losses = losses.view_as(targets)
        return (losses, state) if return_state else losses

    def summed_loss(
        self,
        token_ids: Tensor,
        targets: Tensor | None,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """The loss to train: the sum of `token_losses`, computed with less memory.

        Here padding rows have logits, as in the published code.

        Without targets the loss is None, and only the state is computed.
        """
        x, state = self.features(token_ids, state, return_state)
        if targets is None:
            return None, state
        loss = summed_loss(
            x.flatten(0, 1), self.output_weight, targets.flatten(), self.config.logit_cap
        )
        return (loss, state) if return_state else loss

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not negative."""
        summed: Tensor = self.summed_loss(token_ids, targets)
        return summed / (targets >= 0).sum()

    def n_params(self) -> int:
        """Number of parameters, without counting shared ones twice."""
        return sum(p.numel() for p in self.parameters())

    def size(self, n_vocab: int) -> str:
        """The number of parameters in words, and their number without rows that pad the vocabulary.

        Args:
            n_vocab: ids from here on are padding.
        """
        n_params = self.n_params()
        n_matrices = 1 if self.config.tied else 2
        padding = (self.config.n_vocab_padded - n_vocab) * self.config.n_embd * n_matrices
        if not padding:
            return f"{n_params:,} parameters"
        without = f"{n_params - padding:,} without the rows that pad the vocabulary"
        return f"{n_params:,} parameters ({without})"

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token's forward and backward pass, as MFU counts them.

        2 + 4 for every weight in a matrix product, and three times the operations of the
        attention's forward pass. An embedding lookup counts as none, and so does what a backward
        pass computes again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): log attention's
        executes 1.5 times the operations that are counted for it.
        """
        n_weights = 0
        attention = 0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                n_weights += module.weight.numel()
            elif isinstance(module, Attention):
                attention += module.flops_per_token(seq_len)
        if self.config.tied:
            n_weights += self.embed.weight.numel()
        return 6 * n_weights + 3 * attention
