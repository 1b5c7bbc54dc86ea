"""`get_logger` under its name in TransferQueue."""

from __future__ import annotations

import logging
import os

__all__ = ["get_logger"]


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """Return a logger with the level `TQ_LOGGING_LEVEL`, or else `default_level`. It writes to
    stderr if logging is not configured, because Ray's workers do not inherit the driver's
    configuration."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger
