"""Loggers below `ebbtide`. Only the first rank writes records, and handlers are left to the program."""

import logging

import torch


class _FirstRank(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (the rank decides, whatever is said)
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def logger_of(name: str) -> logging.Logger:
    """Return the logger of the module with this `__name__`."""
    logger = logging.getLogger(name)
    logger.addFilter(_FirstRank())
    return logger
