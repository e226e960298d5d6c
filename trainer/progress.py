"""What one sees while training: a line per interval, and on a terminal a bar below the lines."""

from statistics import harmonic_mean, mean
from typing import Any

from common.console import Track


class TrainingProgress(Track):
    """Counts steps, and follows the lines of metrics.jsonl."""

    lines_beside_bar = True

    def __init__(self, last: int, step: int) -> None:
        """Begin after `step`; `last` is the step after which this run stops."""
        super().__init__("training: step", last, step)
        self._lines: list[dict[str, Any]] = []  # of training, since the last that was printed

    def take(self, line: dict[str, Any]) -> None:
        """Count a step."""
        if "loss" in line:
            self._lines.append(line)
        self.advance(1)

    def line(self) -> str:
        """Return what is printed: the step, then figures of the steps since the last line, and the time left."""
        lines, self._lines = self._lines, []
        figures, last = _figures(lines) if lines else [], f"{self.total:,}"
        return ", ".join([f"step {self.done:{len(last)},} of {last}", *figures, *self.left()])


def _figures(lines: list[dict[str, Any]]) -> list[str]:
    last, over = lines[-1], f" (mean {mean(line['loss'] for line in lines):.4f})" if len(lines) > 1 else ""
    mfu = [line["mfu"] for line in lines if line["mfu"]]
    return [
        f"loss {last['loss']:.4f}{over}",
        f"learning rate {last['lr']:.3g}",
        f"gradient norm {last['grad_norm']:.3g}",
        f"{harmonic_mean(line['tokens_per_second'] for line in lines):,.0f} tokens/s",
        *([f"MFU {harmonic_mean(mfu):.1%}"] if mfu else []),
    ]
