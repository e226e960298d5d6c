"""The proof that a model computes the right numbers on this GPU, before it is used.

A run computes the gradient of its own first micro-batch twice: as configured, with kernels and
compiled code, and in plain torch: float32, without kernels, not compiled. If they differ, the run
tries slower forms, and uses the first in which they agree.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from common.commit import code_digest
from common.console import count, say, warn
from common.files import make_directory, read_json, write_json
from common.memory import out_of_memory
from common.settings import JsonDict, UserError
from model.gpt import GPT
from model.layers import FusedLinear
from model.ops import kernels
from runtime.device import Runtime, compile_blocks, device_name, triton_version
from runtime.distributed import World

ROUNDINGS = 16
"""Roundings of a number that may add up in a gradient. In bfloat16 that is 0.125: right gradients
differ by up to 0.05, for 2 and for 12 layers, and wrong kernels differed by 0.28 and more."""
SMALL = 1e-6
"""Share of the whole gradient's norm below which a parameter's gradient is compared in absolute
terms."""
_AT_ONCE = 2**13
"""Tokens that plain torch computes at once."""
_TEXT = 1024
"""Tokens of the text whose logits are compared."""
LOSS = "the loss"
LOGITS = "the logits"

Gradients = dict[str, Tensor]
"""The loss, and the gradient of each parameter, by name."""


class Form(NamedTuple):
    """How a model runs."""

    compiled: bool
    left_out: tuple[str, ...] = ()
    """Operators whose kernels are not used."""

    def lacks(self, configured: "Form") -> str:
        """What the configured form uses and this one does not, in words."""
        left_out = [operator for operator in self.left_out if operator not in configured.left_out]
        lost = [f"the kernels of {operator}" for operator in left_out]
        if configured.compiled and not self.compiled:
            lost.append("torch.compile")
        return " and ".join(lost)


class Difference(NamedTuple):
    """The largest difference of a form from plain torch."""

    size: float
    """Relative to the tensor's norm; infinity: the form raised an error."""
    name: str
    """The tensor, or the error."""
    norms: str = ""
    """The tensor's norms, for messages."""

    def __str__(self) -> str:
        return self.name + self.norms


def bound_of(dtype: torch.dtype) -> float:
    """The largest relative difference of a right gradient. Float32 is multiplied as TF32."""
    rounding = 2**-7 if dtype == torch.bfloat16 else 2**-10
    return ROUNDINGS * rounding


def prove_gradients(
    gpt: GPT, token_ids: Tensor, targets: Tensor, runtime: Runtime, world: World, compiled: bool
) -> Form:
    """Use the first form of a model that computes the right gradient here, the same in all
    processes.

    Args:
        token_ids: this process's first micro-batch, int64 (B, T).
        targets: (B, T).
        compiled: whether the configured form is compiled.
    """
    ids = token_ids[:, : runtime.sequence_chunk].to(world.device)
    targets = targets[:, : runtime.sequence_chunk].to(world.device)
    with _without_zeros(gpt):
        compile_blocks(gpt, False)
        expected, scales = plain_gradients(gpt, ids, targets)

        def difference_of(form: Form) -> Difference:
            use(gpt, form)
            return compare(gradients(gpt, ids, targets, runtime), expected, scales)

        form, largest = first_right(difference_of, compiled, runtime.dtype, world)
    sequences = count(len(ids), "sequence")
    say(
        f"gradients of the first {sequences} agree with plain torch: "
        f"largest difference {largest.size:.2g}, in {largest.name}"
    )
    return form


def first_right(
    difference_of: Callable[[Form], Difference], compiled: bool, dtype: torch.dtype, world: World
) -> tuple[Form, Difference]:
    """Return the first form that is right in all processes, and its largest difference. Warn of
    what is wrong.

    Args:
        difference_of: uses a form and compares it with plain torch, in this process. Its last
            call is for the form that is returned.
        compiled: whether the configured form is compiled.
        dtype: of the run.

    Raises:
        UserError: not even plain torch is right in this dtype.
    """
    configured = Form(compiled, tuple(sorted(kernels.left_out)))
    kernels.used.clear()
    first = None
    for form in _forms(configured, world):
        difference = _largest(difference_of, form, world)
        first = first or difference
        if difference.size <= bound_of(dtype):
            break
    else:
        raise UserError(
            f"{first}, and without kernels and compilation {difference}: "
            "use runtime.dtype=float32, or runtime.proof=false to go on"
        )
    if form != configured:
        without = form.lacks(configured)
        warn(f"{first}: this goes on without {without}, which is slower")
    return form, difference


def _forms(configured: Form, world: World) -> Iterator[Form]:
    """Yield the forms to try: as configured, without the kernels of each operator, without all.

    Each comes compiled, if that is configured, and not compiled. All processes must take the same
    number of forms, because they exchange what they used.
    """
    compiled_or_not = [True, False] if configured.compiled else [False]

    def without(operators: Iterable[str]) -> Iterator[Form]:
        for compiled in compiled_or_not:
            yield Form(compiled, (*configured.left_out, *operators))

    def used() -> list[str]:
        # In one process, an error may have come before some operators.
        return sorted(set().union(*world.exchange([*kernels.used])))

    yield from without(())
    for operator in used():
        yield from without([operator])
    all_used = used()
    if len(all_used) > 1:
        yield from without(all_used)


def _largest(difference_of: Callable[[Form], Difference], form: Form, world: World) -> Difference:
    """Return a form's largest difference in all processes."""
    try:
        local = difference_of(form)
    except Exception as error:  # compilers raise errors of any kind
        if out_of_memory(error):
            raise
        local = Difference(math.inf, str(error).strip().partition("\n")[0] or repr(error))
    return Difference(*max(world.exchange(local)))


def use(gpt: GPT, form: Form) -> None:
    """Run a model in this form from now on."""
    if set(form.left_out) != kernels.left_out:
        kernels.leave_out(form.left_out)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled code holds the choice of kernels
    compile_blocks(gpt, form.compiled)


def gradients(gpt: GPT, token_ids: Tensor, targets: Tensor, runtime: Runtime) -> Gradients:
    """Return the summed loss, as a training step computes it, and its gradient.

    Both are divided by the number of targets. Targets that do not count are among them.
    Each matrix of a fused weight has its own gradient: those of q and v would hide that of k.
    """
    with runtime.autocast():
        loss = gpt.summed_loss(token_ids, targets) / targets.numel()
    named = dict(gpt.named_parameters())
    grads = torch.autograd.grad(loss, [*named.values()], materialize_grads=True)
    results = {LOSS: loss.detach()} | dict(zip(named, grads, strict=True))
    for name, module in gpt.named_modules():
        if isinstance(module, FusedLinear):
            fused = results.pop(f"{name}.weight")
            for i, matrix in enumerate(module.split(fused)):
                results[f"{name}.weight[{i}]"] = matrix
    return results


def plain_gradients(
    gpt: GPT, token_ids: Tensor, targets: Tensor
) -> tuple[Gradients, dict[str, Tensor]]:
    """Return the loss and gradients in float32, a few sequences at a time, and the scale of each.

    The scale is the root of the sum of the squared norms of the terms that a few sequences give.
    For independent terms, it is the norm of their sum. Where terms cancel, it does not vanish: nor
    do their rounding errors.
    """
    rows = max(1, min(_AT_ONCE // token_ids.shape[1], len(token_ids) // 8))
    recompute = gpt.recompute
    gpt.recompute = "block"
    total: Gradients = {}
    squares: dict[str, Tensor] = {}
    with _plain_torch():
        runtime = Runtime(gpt.device, torch.float32)
        for row_ids, row_targets in zip(token_ids.split(rows), targets.split(rows), strict=True):
            share = len(row_ids) / len(token_ids)
            for name, value in gradients(gpt, row_ids, row_targets, runtime).items():
                term = value.float() * share
                total[name] = total.get(name, 0) + term
                squares[name] = squares.get(name, 0) + term.norm().square()
    gpt.recompute = recompute
    return total, {name: square.sqrt() for name, square in squares.items()}


def compare(actual: Gradients, expected: Gradients, scales: dict[str, Tensor]) -> Difference:
    """Return the largest difference, relative to each tensor's scale, or its norm if larger."""
    units = {name: scales[name].maximum(value.norm()) for name, value in expected.items()}
    whole = torch.stack([units[name] for name in units if name != LOSS]).norm()
    sizes = {
        name: (actual[name].float() - value).norm() / units[name].maximum(SMALL * whole)
        for name, value in expected.items()
    }
    if LOSS in sizes:
        sizes[LOSS] *= ROUNDINGS  # it may differ by one rounding only: it is a mean of many losses
    largest = torch.stack([*sizes.values()]).nan_to_num(nan=math.inf).max(0)
    name = [*sizes][int(largest.indices)]
    actual_norm = actual[name].float().norm()
    norms = f" has norm {actual_norm:.4g}, in plain torch {expected[name].norm():.4g}"
    return Difference(float(largest.values), name, norms)


def prove_logits(gpt: GPT, runtime: Runtime, autocast: bool) -> None:
    """Use only kernels with which a model's logits are right on this GPU.

    An earlier proof for this model and GPU is used. If there is none, the logits of a text of
    random tokens are compared with plain torch.

    Args:
        autocast: whether the model runs in `runtime.autocast()`.
    """
    proofs = Proofs(gpt, runtime.dtype)
    form = proofs.read()
    if form is not None:
        kernels.leave_out({*kernels.left_out, *form.left_out})
        return
    length = min(_TEXT, gpt.config.max_len or _TEXT)
    n_ids = min(gpt.config.n_vocab, 16)  # so few that strings occur again
    ids = torch.randint(n_ids, (1, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(gpt.device)
    wide = {name: p.float() for name, p in gpt.named_parameters()}
    with torch.inference_mode(), _plain_torch():
        expected = {LOGITS: functional_call(gpt, wide, (ids,))}
    norms = {LOGITS: expected[LOGITS].norm()}

    def difference_of(form: Form) -> Difference:
        use(gpt, form)
        context = runtime.autocast() if autocast else nullcontext()
        with torch.inference_mode(), context:
            return compare({LOGITS: gpt(ids)}, expected, norms)

    form, _ = first_right(difference_of, False, runtime.dtype, World(gpt.device))
    proofs.write(form, {"logits": True})


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
def _plain_torch() -> Iterator[None]:
    """Use no kernels, and multiply float32 matrices in float32, not in TF32."""
    left_out = [*kernels.left_out]
    precision = torch.get_float32_matmul_precision()
    kernels.leave_out(kernels.OPERATORS)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        kernels.leave_out(left_out)
        torch.set_float32_matmul_precision(precision)


class Proofs:
    """What was proved for a model on this GPU: a JSON file in the folder of caches."""

    def __init__(self, gpt: GPT, dtype: torch.dtype) -> None:
        """`dtype`: the run's."""
        about = {
            "device": device_name(gpt.device),
            "torch": torch.__version__,
            "triton": triton_version(),
            "sources": code_digest(["model"]),
            "model": gpt.config.model_dump(mode="json"),
            "dtype": str(dtype),
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        self._about = about
        self._path = cache_folder() / f"{key}.json"

    def read(self, options: JsonDict | None = None) -> Form | None:
        """Return the form that was proved, with these options if any are given."""
        try:
            proof = read_json(self._path)
            if options is not None and proof["options"] != options:
                return None
            return Form(proof["compiled"], tuple(proof["left_out"]))
        except (UserError, KeyError):  # not there, or damaged: it is proved again
            return None

    def write(self, form: Form, options: JsonDict) -> None:
        """Keep a form, or warn that this is not possible."""
        try:
            make_directory(self._path.parent, "XDG_CACHE_HOME")
            write_json(self._path, {**self._about, "options": options, **form._asdict()})
        except (UserError, OSError) as error:
            warn(f"what was proved is not kept for the next start: {error}")


def cache_folder() -> Path:
    """Where proofs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "log_gpt" / "proofs"
