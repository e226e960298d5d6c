"""Replaces common/console.py in an exported folder: messages go to the log of transformers."""

from transformers.utils import logging

_logger = logging.get_logger(__name__)


def say_once(message: str) -> None:
    """Log one line, the first time."""
    _logger.info_once(message)


def warn(message: str) -> None:
    """Log one warning."""
    _logger.warning(message)
