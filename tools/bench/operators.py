"""Attention and recurrence, forward and backward: checked against their definitions, then timed beside each other."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
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
PATTERNS = {
    "window 256": [window(256)],
    "longformer 256 + 16": [longformer(256, 16)],
    "strided 128": [strided(128, "A1"), strided(128, "A2")],
    "fixed 128 / 8": [fixed(128, 8, "A1"), fixed(128, 8, "A2")],
}

Operator = Callable[..., Any]
"""Tensors -> a tensor."""
Ours = dict[str, tuple[Operator, Operator]]
"""Operators by name, each with its definition."""


def measure(options: Any) -> dict[str, list[Row]]:
    """Check every operator, then time all of a kind at each length.

    Raises:
        UserError: an operator is wrong; nothing is timed.
    """
    device, n_head, d = options.device, options.heads, options.head_dim
    log, sparse, recurrence = log_attention_forms(device), sparse_attention_forms(n_head), recurrence_forms()
    say("checking all operators against their definitions in float64")
    for dtype in dict.fromkeys((torch.float32, DTYPES[device])):
        inputs = partial(attention_inputs, (1, n_head, CHECKED, d), device, dtype)
        check(log, inputs, DEVIATIONS)
        check(sparse, inputs)
    check(recurrence, partial(recurrence_inputs, CHECKED, d, device))
    rows, profiles = [], {}
    for T in options.lengths:
        given = attention_inputs((options.batch, n_head, T, d), device, DTYPES[device])
        attention: dict[str, Operator] = {"SDPA": partial(scaled_dot_product_attention, is_causal=True)}
        latents = 4 * d * given[1].numel()
        if latents <= LATENT_BYTES:
            attention["published"] = naive_log_attention
        else:
            say(f"skipped at {T} tokens: published, its latents alone take {latents / 1e9:.1f} GB")
        attention |= {name: run for name, (run, _) in (log | sparse).items()}
        rows += [{"operator": name, "T": T} | row for name, row in times_of(attention, *given, options).items()]
        if options.profile:
            name, (run, _) = next(reversed(log.items()))
            profiles[f"log attention, {name}, {T} tokens"] = profiled(partial(outputs, run, *given))
    T = options.lengths[0]
    forms = {"published recurrence": published_recurrence, "log recurrence": recurrence["log recurrence"][0]}
    found = times_of(forms, *recurrence_inputs(T, n_head * d, device), options)
    return {"operators": rows + [{"operator": name, "T": T} | row for name, row in found.items()], **profiles}


def log_attention_forms(device: str) -> Ours:
    """Return log attention by each backend that is timed here, with gates of heads and without."""

    def gated(q: Tensor, k: Tensor, log_v: Tensor, attend: Operator) -> Any:
        return attend(q, k, log_v, logsigmoid(k[..., :1] + 4))

    found: Ours = {}
    for backend in ("chunked", *(["triton"] if device == "cuda" and find_spec("triton") else [])):
        attend = partial(log_attention, backend=backend)
        found[f"{backend}, gates"] = partial(gated, attend=attend), partial(gated, attend=naive_log_attention)
        found[backend] = attend, naive_log_attention
    return found


def sparse_attention_forms(n_head: int) -> Ours:
    """Return sparse attention by its patterns; those of two kinds alternate over the heads."""
    by_head = {name: (n_head * kinds)[: n_head if len(kinds) > 1 else 1] for name, kinds in PATTERNS.items()}
    return {
        name: (partial(sparse_attention, patterns=patterns), partial(naive_sparse_attention, patterns=patterns))
        for name, patterns in by_head.items()
    }


def recurrence_forms() -> Ours:
    """Return the log recurrence as a function of log_p, h and state."""
    forms = log_recurrence, naive_log_recurrence
    run, definition = (lambda log_p, h, state, form=form: form(log_p, h, state=state) for form in forms)
    return {"log recurrence": (run, definition)}


def published_recurrence(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """The published form, from a state (B, D): it sums over the whole sequence, so its rounding error grows with T."""
    A = log_p.cumsum(1)
    return A + torch.cat([state.unsqueeze(1), h - A], 1).logcumsumexp(1)[:, 1:]


def attention_inputs(
    shape: Sequence[int], device: str, dtype: torch.dtype = torch.float32, deviation: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Random q, k and v, which require gradients, and the gradient of the result, all (B, H, T, D)."""
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    leaves = [(deviation * torch.randn(shape, **options)).requires_grad_() for _ in range(3)]
    return leaves, torch.randn(shape, **options)


def recurrence_inputs(T: int, D: int, device: str, deviation: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Return log_p and h (1, T, D) and state (1, D), which require gradients, and the gradient of s, in float32."""
    (p, h, state), weights = attention_inputs((1, T, D), device, deviation=deviation)
    return [x.detach().requires_grad_() for x in (logsigmoid(p), h, state[:, 0])], weights


def outputs(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradient of every leaf, given `weights` as the gradient of the result."""
    y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def check(ours: Ours, inputs: Callable[..., tuple[list[Tensor], Tensor]], deviations: Sequence[int] = (1,)) -> None:
    """Compare each operator with its definition in float64, for inputs of each standard deviation.

    Raises:
        UserError: an error is above twice that of the definition in the inputs' type, plus 1e-6, plus the rounding of
            16-bit products.
    """
    for name, (run, definition) in ours.items():
        for deviation in deviations:
            leaves, weights = inputs(deviation=deviation)
            exact = outputs(definition, [x.detach().double().requires_grad_() for x in leaves], weights.double())
            found, own = (errors(outputs(one, leaves, weights), exact) for one in (run, definition))
            # In 16 bits, either sum of log_y = log_S - log_Z adds products of up to four numbers, each half an eps off.
            rounding = 0.0 if weights.dtype == torch.float32 else 4 * torch.finfo(weights.dtype).eps
            for what, error, of_definition in zip(("result", "gradients"), found, own, strict=True):
                allowed = 2 * of_definition + 1e-6 + rounding
                if not error <= allowed:  # NaN is wrong too
                    about = f"{weights.dtype}, standard deviation {deviation}: error {error:.1e}, allowed {allowed:.1e}"
                    raise UserError(f"{name} is wrong in its {what} ({about}); nothing is timed")


def errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest error of the result, and of gradients relative to the largest one; NaN if one has NaN."""
    off = torch.stack([(a.double() - b).abs().max() for a, b in zip(got, exact, strict=True)])
    return off[0].item(), (off[1:].max() / max(x.abs().max() for x in exact[1:])).item()


def times_of(operators: dict[str, Operator], leaves: Sequence[Tensor], weights: Tensor, options: Any) -> dict[str, Row]:
    """Median milliseconds of each operator's forward pass, which keeps nothing, and of both passes, with ratios.

    Each turn begins with an untimed pass: what the others leave in caches and in the allocator does not count.
    """
    turns = {}
    for name, run in operators.items():
        both = partial(outputs, run, leaves, weights)
        both()  # compiles and tunes, if need be
        for key, work in (("forward", torch.no_grad()(partial(run, *leaves))), ("both", both)):
            timer = Timer("run()", globals={"run": work}, num_threads=torch.get_num_threads())
            turns[name, key] = partial(timer.blocked_autorange, min_run_time=options.seconds)
    rows: dict[str, Row] = {name: {} for name in operators}
    for (name, key), found in in_turn(turns, options.rounds).items():
        rows[name][f"{key}_ms"] = 1e3 * statistics.median(one.median for one in found)
    first = next(iter(rows.values()))
    for row in rows.values():
        row |= {f"{key}_x": first[f"{key}_ms"] / row[f"{key}_ms"] for key in ("forward", "both")}
    return rows
