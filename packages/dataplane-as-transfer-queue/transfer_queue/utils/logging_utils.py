"""`get_logger` where TransferQueue has it."""

from __future__ import annotations

import logging
import os

__all__ = ["get_logger"]


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """A logger of this level, or of `TQ_LOGGING_LEVEL`, that writes to stderr where nobody has
    configured logging: Ray's workers have nothing of their driver's."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger
