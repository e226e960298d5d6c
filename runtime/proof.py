"""The proof that a model computes the right numbers on this GPU, before it is used.

A run computes the gradient of its own first micro-batch twice: as a step does, with kernels and
compiled code, and in plain torch: float32, without kernels, not compiled. If they differ, the run
goes on in plain torch.

The gradient is compared for each eighth of the targets by itself. An error in a few sequences is
not lost among the others, and the eight norms of a parameter give its scale: that of the whole
gradient vanishes where terms cancel, and their rounding errors do not.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from common.commit import code_digest
from common.console import count, say, warn
from common.files import make_directory, read_json, write_json
from common.memory import is_out_of_memory
from common.settings import JsonDict, UserError
from model.gpt import GPT
from model.layers import FusedLinear
from model.ops import kernels
from runtime.device import Compute, compile_blocks, device_name, not_compiled, triton_version
from runtime.distributed import World

LOSS = "the loss"
LOGITS = "the logits"
TOKENS = "the embedding of a token"
_N_GROUPS = 8
_ROUNDINGS = 16.0, 10.0
"""Roundings of the dtype by which a norm may differ in one group of targets, and in all."""
_ROUNDINGS_OF_LOSS = 1.0, 0.5
_WEAK = 0.01
"""Share of the norm of all parts of a tensor below which a part does not count."""
_SMALL = 1e-6
"""Share of the largest norm below which a norm does not count."""
_TEXT = 1024
"""Tokens of the text whose logits are compared."""
_BLOCK = 64
"""Tokens whose logits are compared by themselves."""

Norms = dict[str, Tensor]
"""Norms by name, (groups, parts of the tensor); each token is a group."""


class Difference(NamedTuple):
    """The largest difference from plain torch."""

    share: float
    """Of what rounding may cause: above 1 it is an error; infinity: an exception."""
    text: str
    """What differs, or the exception."""


def prove_gradients(
    gpt: GPT,
    add_gradients: Callable[[Tensor, Tensor], Tensor],
    token_ids: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    world: World,
) -> bool:
    """Return whether a model computes the right gradient, in all processes. If not, use plain torch
    from now on.

    Args:
        add_gradients: adds the gradient of (token_ids, targets) to the parameters', as a step
            does, and returns the summed loss.
        token_ids: this process's first micro-batch, int64 (B, T).
        targets: (B, T).
        dtype: of the run.
    """
    ids = token_ids.to(world.device)

    def difference() -> Difference:
        expected = []
        off = []
        # For each eighth of the targets: the gradient in plain torch, times -1, to which the
        # configured form adds its own. What remains is the difference.
        for group in _groups(targets):
            group = group.to(world.device)
            plain_loss, plain = _subtract_plain_gradients(gpt, ids, group)
            expected.append(_norms(gpt, plain_loss, plain))
            with _token_gradients(gpt) as of_chunks:
                loss = plain_loss + add_gradients(ids, group)
            of_tokens = plain + torch.cat(of_chunks[::-1], dim=1)  # the last chunk came first
            off.append(_norms(gpt, loss, of_tokens))
            gpt.zero_grad()
        return compare_norms(off, expected, dtype)

    with _without_zeros(gpt):
        is_right, largest = choose_form(gpt, difference, world)
    sequences = count(len(token_ids), "sequence")
    say(f"gradients of the first {sequences} agree with plain torch: {largest.text}")
    return is_right


def choose_form(
    gpt: GPT, difference: Callable[[], Difference], world: World
) -> tuple[bool, Difference]:
    """Return whether the configured form of a model is right in all processes, and the difference
    of the form that is used from now on: that, or plain torch.

    Args:
        difference: that of the model as it is, in this process.

    Raises:
        UserError: not even plain torch is right.
    """
    configured = _largest(difference, world)
    if configured.share <= 1:
        return True, configured
    use_plain_torch(gpt)
    plain = _largest(difference, world)
    if plain.share > 1:
        raise UserError(
            f"{configured.text}; in plain torch {plain.text}: "
            "use runtime.dtype=float32, or runtime.proof=false to go on"
        )
    warn(f"{configured.text}: this goes on in plain torch, without kernels, which is slower")
    return False, plain


def _largest(difference: Callable[[], Difference], world: World) -> Difference:
    """Return the largest difference in all processes."""
    try:
        local = difference()
    except Exception as error:  # compilers raise errors of any kind
        if is_out_of_memory(error):
            raise
        local = Difference(math.inf, str(error).strip().partition("\n")[0] or repr(error))
        if world.device.type == "cuda":
            try:
                torch.cuda.synchronize(world.device)
            except RuntimeError:  # this process can no longer use the GPU
                raise UserError(f"{local.text}: use runtime.kernels=false") from None
    return Difference(*max(world.exchange(local)))


def use_plain_torch(gpt: GPT) -> None:
    """Run a model without kernels and compilation from now on."""
    kernels.enabled = False
    compile_blocks(gpt, False)


def _groups(targets: Tensor) -> list[Tensor]:
    """Return the targets (B, T) eight times, each time an eighth of them; the others are -1."""
    number = ((targets >= 0).flatten().cumsum(0) - 1).clamp(min=0).view_as(targets)
    group = number * _N_GROUPS // (number.max() + 1)
    return [targets.where(group == i, -1) for i in group.unique()]


def _subtract_plain_gradients(
    gpt: GPT, token_ids: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Give parameters their gradient in float32, times -1; return the loss and the gradients of
    embeddings (B, T, n_embd), times -1. Sequences without targets have none."""
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)
    rows = (targets >= 0).any(1)
    with _plain_torch(gpt), _token_gradients(gpt) as found:
        loss = -gpt.summed_loss(token_ids[rows], targets[rows])
        loss.backward()
    of_tokens = found[0].new_zeros(*targets.shape, gpt.config.n_embd)
    of_tokens[rows] = found[0]
    return loss.detach(), of_tokens


def _norms(gpt: GPT, loss: Tensor, of_tokens: Tensor) -> Norms:
    """The norms of a loss, of gradients of embeddings (B, T, n_embd), and of the parameters'.

    The heads of fused matrices are parts: errors of k would be lost among q and v.
    """
    norms = {LOSS: loss.abs().view(1, 1), TOKENS: of_tokens.norm(dim=-1).view(-1, 1)}
    modules = dict(gpt.named_modules())
    for name, p in gpt.named_parameters():
        assert p.grad is not None
        parts = [p.grad]
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, FusedLinear) and p is module.weight:
            matrices = module.split(p.grad)
            parts = [head for matrix in matrices for head in matrix.split(gpt.config.head_features)]
        norms[name] = torch.stack([part.norm() for part in parts])[None]
    return norms


@contextmanager
def _token_gradients(gpt: GPT) -> Iterator[list[Tensor]]:
    """Collect gradients of embeddings (B, T, n_embd), in the order of backward passes."""
    found: list[Tensor] = []

    def watch(module: Any, inputs: Any, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(found.append)

    handle = gpt.embed.register_forward_hook(watch)
    try:
        yield found
    finally:
        handle.remove()


def compare_norms(off: list[Norms], expected: list[Norms], dtype: torch.dtype) -> Difference:
    """Return the largest difference, of a group of targets or of all.

    A group's is relative to its norm, or to the root mean square of all groups' norms if larger.
    Where a gradient cancels, or is far below that of other heads, rounding errors stay.

    Args:
        off: norms of differences, for each group.
        expected: norms in plain torch.
        dtype: of the run. Float32 is multiplied as TF32.
    """
    smallest = _SMALL * max(norm.max() for group in expected for norm in group.values())
    rounding = 2**-7 if dtype == torch.bfloat16 else 2**-10
    largest = Difference(-1, "")
    for name in expected[0]:
        norms = torch.cat([group[name] for group in expected])
        differences = torch.cat([group[name] for group in off])
        root = norms.count_nonzero(0).clamp(min=1).sqrt()  # of the number of groups
        mean = norms.norm(dim=0) / root
        unit = mean.maximum(_WEAK * mean.norm()).maximum(smallest)
        sizes = differences / norms.maximum(unit), differences.norm(dim=0) / root / unit
        allowed = _ROUNDINGS_OF_LOSS if name == LOSS else _ROUNDINGS
        for parts, roundings in zip(sizes, allowed, strict=True):
            size = float(parts.nan_to_num(nan=math.inf).max())
            bound = rounding * roundings
            text = f"largest difference {size:.2g} in {name}, bound {bound:.2g}"
            largest = max(largest, Difference(size / bound, text))
    return largest


def prove_logits(gpt: GPT, compute: Compute, autocast: bool) -> None:
    """Use plain torch if a model's logits are wrong on this GPU: of random tokens, in two chunks.

    Args:
        autocast: whether the model runs in `compute.autocast()`.
    """
    stored = StoredProof(gpt, compute.dtype, {"autocast": autocast, "kernels": kernels.enabled})
    is_right = stored.read()
    if is_right is not None:
        kernels.enabled &= is_right
        return
    # Compute the logits of a short text in plain torch, in float32.
    length = min(_TEXT, gpt.config.max_len or _TEXT)
    n_ids = min(gpt.config.n_vocab, 16)  # so few that strings occur again
    ids = torch.randint(n_ids, (1, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(gpt.device)
    wide = {name: p.float() for name, p in gpt.named_parameters()}
    with torch.inference_mode(), _plain_torch(gpt):
        expected = functional_call(gpt, wide, (ids,))

    def norms(logits: Tensor) -> Norms:
        return {LOGITS: torch.stack([x.norm() for x in logits.split(_BLOCK, dim=1)])[:, None]}

    def difference() -> Difference:
        context = compute.autocast() if autocast else nullcontext()
        state = None
        logits = []
        with torch.inference_mode(), context:
            for chunk in ids.chunk(2, dim=1):
                of_chunk, state = gpt(chunk, state, return_state=True)
                logits.append(of_chunk)
            off = torch.cat(logits, dim=1) - expected
        return compare_norms([norms(off)], [norms(expected)], compute.dtype)

    is_right, _ = choose_form(gpt, difference, World(gpt.device))
    stored.write(is_right)


@contextmanager
def _without_zeros(gpt: GPT) -> Iterator[None]:
    """Give parameters that are 0 random values, so that errors in what they are multiplied with
    show."""
    zeros = [p for p in gpt.parameters() if not p.any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in zeros:
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    try:
        yield
    finally:
        for p in zeros:
            torch.nn.init.zeros_(p)


@contextmanager
def _plain_torch(gpt: GPT) -> Iterator[None]:
    """Use no kernels and no compiled code, and multiply float32 matrices in float32, not in TF32.

    Blocks are computed again in backward passes.
    """
    before = kernels.enabled, gpt.recompute, torch.get_float32_matmul_precision()
    kernels.enabled = False
    gpt.recompute = "block"
    torch.set_float32_matmul_precision("highest")
    try:
        with not_compiled(gpt):
            yield
    finally:
        kernels.enabled, gpt.recompute, precision = before
        torch.set_float32_matmul_precision(precision)


class StoredProof:
    """Whether a model was right on this GPU: a JSON file in the folder of caches."""

    def __init__(self, gpt: GPT, dtype: torch.dtype, options: JsonDict) -> None:
        """`dtype`: the run's; `options`: what else matters."""
        self._about = {
            "device": device_name(gpt.device),
            "torch": torch.__version__,
            "triton": triton_version(),
            "sources": code_digest(["model"]),
            "model": gpt.config.model_dump(mode="json"),
            "dtype": str(dtype),
            **options,
        }
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        key = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache / "log_gpt/proofs" / f"{key}.json"

    def read(self) -> bool | None:
        """Whether it was right; None: it is not known."""
        try:
            return bool(read_json(self.path)["is_right"])
        except (UserError, KeyError):  # not there, or damaged: it is proved again
            return None

    def write(self, is_right: bool) -> None:
        """Keep the outcome, or warn that this is not possible."""
        try:
            make_directory(self.path.parent, "XDG_CACHE_HOME")
            write_json(self.path, {**self._about, "is_right": is_right})
        except (UserError, OSError) as error:
            warn(f"what was proved is not kept for the next start: {error}")
