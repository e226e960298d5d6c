"""Attention and recurrence, forward and backward: checked against their definitions, then timed beside each other."""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torch.utils.benchmark import Timer

from common.console import say
from common.settings import UserError
from model.ops.log_attention import log_attention, naive_log_attention
from model.ops.log_recurrence import log_recurrence
from model.ops.log_recurrence.naive import naive_log_recurrence
from model.ops.sparse_attention import naive_sparse_attention, sparse_attention
from model.ops.sparse_attention.patterns import fixed, longformer, strided, window
from tools.bench.harness import Row, in_turn, profiled

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
DEVIATIONS = (1, 5, 20, 80, 200)  # of q, k and log_v: from 20 on, plain exponentials under- and overflow
CHECKED = 512  # tokens
LATENT_BYTES = 2e9  # the published formula keeps several times its T x d_k x d_v latents: with more it is skipped
SDPA = {"cpu": ["FLASH_ATTENTION"], "cuda": ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"]}
PATTERNS = {
    "window 256": [window(256)],
    "longformer 256 + 16": [longformer(256, 16)],
    "strided 128": [strided(128, "A1"), strided(128, "A2")],
    "fixed 128 / 8": [fixed(128, 8, "A1"), fixed(128, 8, "A2")],
}

Operator = Callable[..., Any]
"""Tensors -> a tensor."""


class Contender(NamedTuple):
    """An operator to time."""

    run: Operator
    definition: Operator | None = None
    """What it must equal; None: it is not ours, and is not checked."""
    deviations: Sequence[int] = (1,)
    """Standard deviations of the inputs that it is checked with."""


def measure(options: Any) -> dict[str, list[Row]]:
    """Check every operator, then time all of a kind at each length.

    Raises:
        UserError: an operator is wrong; nothing is timed.
    """
    device, d = options.device, options.head_dim
    attention = contenders(device, options.heads)
    say("checking all operators against their definitions in float64")
    for dtype in dict.fromkeys((torch.float32, DTYPES[device])):
        check(attention, partial(attention_inputs, (1, options.heads, CHECKED, d), device, dtype))
    check(RECURRENCES, partial(recurrence_inputs, CHECKED, d, device))
    rows, profiles = [], {}
    for T in options.lengths:
        inputs = attention_inputs((options.batch, options.heads, T, d), device, DTYPES[device])
        rows += [{"operator": name, "T": T} | row for name, row in times_of(attention, *inputs, options).items()]
        if options.profile:
            name = "triton" if "triton" in attention else "chunked"
            run = partial(outputs, attention[name].run, *inputs)
            profiles[f"log attention, {name}, {T} tokens"] = profiled(run)
    inputs = recurrence_inputs(options.lengths[0], options.heads * d, device)
    found = times_of(RECURRENCES, *inputs, options)
    rows += [{"operator": name, "T": options.lengths[0]} | row for name, row in found.items()]
    return {"operators": rows, **profiles}


def contenders(device: str, n_head: int) -> dict[str, Contender]:
    """Return every attention: torch's softmax first, log attention in each form, then sparse attention."""

    def softmax(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def gated(q: Tensor, k: Tensor, log_v: Tensor, attend: Operator) -> Any:
        return attend(q, k, log_v, logsigmoid(k[..., :1] + 4))

    found = {
        f"SDPA {kernel.split('_')[0].lower()}": Contender(partial(softmax, kernel=kernel)) for kernel in SDPA[device]
    }
    found["published"] = Contender(naive_log_attention)
    for backend in ("chunked", *(["triton"] if device == "cuda" and find_spec("triton") else [])):
        ours = partial(log_attention, backend=backend)
        found[backend] = Contender(ours, naive_log_attention, DEVIATIONS)
        definition = partial(gated, attend=naive_log_attention)
        found[f"{backend}, with gates"] = Contender(partial(gated, attend=ours), definition)
    for name, patterns in PATTERNS.items():
        own = [patterns[head % len(patterns)] for head in range(n_head)] if len(patterns) > 1 else patterns
        found[name] = Contender(partial(sparse_attention, patterns=own), partial(naive_sparse_attention, patterns=own))
    return found


def published_recurrence(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """The published form, from a state (B, D): it sums over the whole sequence, so its rounding error grows with T."""
    A = log_p.cumsum(1)
    return A + torch.cat([state.unsqueeze(1), h - A], 1).logcumsumexp(1)[:, 1:]


RECURRENCES = {
    "published recurrence": Contender(published_recurrence),
    "log recurrence": Contender(
        lambda log_p, h, state: log_recurrence(log_p, h, state=state),
        lambda log_p, h, state: naive_log_recurrence(log_p, h, state=state),
    ),
}


def attention_inputs(
    shape: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.float32, deviation: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Random q, k and v, which require gradients, and the gradient of the result, all (B, H, T, D)."""
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    leaves = [(deviation * torch.randn(shape, **options)).requires_grad_() for _ in range(3)]
    return leaves, torch.randn(shape, **options)


def recurrence_inputs(T: int, D: int, device: str, deviation: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Return log_p and h (1, T, D) and state (1, D), which require gradients, and the gradient of s, in float32."""
    (p, h, state), weights = attention_inputs((1, T, D), device, deviation=deviation)
    leaves = [logsigmoid(p), h, state[:, 0]]
    return [x.detach().requires_grad_() for x in leaves], weights


def outputs(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradient of every leaf, given `weights` as the gradient of the result."""
    y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def check(contenders: Mapping[str, Contender], inputs: Callable[..., tuple[list[Tensor], Tensor]]) -> None:
    """Compare each contender with its definition in float64. `inputs` draws leaves and weights of a deviation.

    Raises:
        UserError: an error is above twice that of the definition in the inputs' type, plus 1e-6, plus the rounding of
            16-bit products.
    """
    for name, (run, definition, deviations) in contenders.items():
        if definition is None:
            continue
        for deviation in deviations:
            leaves, weights = inputs(deviation=deviation)
            exact = outputs(definition, [x.detach().double().requires_grad_() for x in leaves], weights.double())
            found, own = (errors(outputs(one, leaves, weights), exact) for one in (run, definition))
            dtype = weights.dtype
            # In 16 bits, either sum of log_y = log_S - log_Z adds products of up to four numbers, each half an eps off.
            rounding = 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            for what, error, of_definition in zip(("its result", "its gradients"), found, own, strict=True):
                allowed = 2 * of_definition + 1e-6 + rounding
                if not error <= allowed:  # NaN is wrong too
                    about = f"{dtype}, standard deviation {deviation}: error {error:.1e}, allowed {allowed:.1e}"
                    raise UserError(f"{name} is wrong in {what} ({about}); nothing is timed")


def errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest error of the result, and of gradients relative to the largest one; NaN if one has NaN."""
    off = torch.stack([(a.double() - b).abs().max() for a, b in zip(got, exact, strict=True)])
    return off[0].item(), (off[1:].max() / max(x.abs().max() for x in exact[1:])).item()


def times_of(
    contenders: Mapping[str, Contender], leaves: Sequence[Tensor], weights: Tensor, options: Any
) -> dict[str, Row]:
    """Median milliseconds of each contender's forward pass, which keeps nothing, and of both passes, with ratios.

    Each turn begins with an untimed pass and then lasts a fraction of a second or one pass: what the others leave in
    caches and in the allocator does not count.
    """
    turns = {}
    for name, (run, *_) in contenders.items():
        both = partial(outputs, run, leaves, weights)
        if problem := why_not(name, both, leaves[0].shape):
            say(f"skipped at {tuple(leaves[0].shape)}: {name}, {problem}")
            continue
        for key, work in (("forward", torch.no_grad()(partial(run, *leaves))), ("both", both)):
            timer = Timer("run()", globals={"run": work}, num_threads=torch.get_num_threads())
            turns[name, key] = partial(timer.blocked_autorange, min_run_time=options.seconds)
    rows: dict[str, Row] = {}
    for (name, key), found in in_turn(turns, options.rounds).items():
        rows.setdefault(name, {})[f"{key}_ms"] = 1e3 * statistics.median(one.median for one in found)
    first = next(iter(rows.values()))
    for row in rows.values():
        row |= {f"{key}_x": first[f"{key}_ms"] / row[f"{key}_ms"] for key in ("forward", "both")}
    return rows


def why_not(name: str, run: Callable[[], Any], shape: Sequence[int]) -> str | None:
    """Run both passes once, so that nothing is compiled or tuned later; returns why they cannot run, or None."""
    latents = 4 * shape[-1] * torch.Size(shape).numel()
    if name == "published" and latents > LATENT_BYTES:
        return f"its latents alone take {latents / 1e9:.1f} GB"
    try:
        with warnings.catch_warnings(action="ignore"):  # SDPA gives many lines of reasons why a kernel does not run
            run()
    except torch.OutOfMemoryError:
        return "out of memory"
    except RuntimeError as error:
        if not name.startswith("SDPA"):  # an error in our kernels is no reason to skip them
            raise
        return str(error).splitlines()[0]
    return None
