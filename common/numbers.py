"""Arithmetic of whole numbers, and how figures are written."""

import math


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return (a + b - 1) // b


def plus_minus(stderr: float | None) -> str:
    """Return " ± 0.0061", or nothing for an unknown standard error."""
    return f" ± {stderr:.4f}" if stderr is not None and math.isfinite(stderr) else ""
