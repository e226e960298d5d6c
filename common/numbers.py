"""Arithmetic of whole numbers."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return (a + b - 1) // b
