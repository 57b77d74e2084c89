"""Loggers below `ebbtide`: the first rank alone speaks, and no handler is added, for programs choose what they show."""

import logging

import torch


class _FirstRank(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (the rank decides, whatever is said)
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def logger_of(name: str) -> logging.Logger:
    """The logger of a module, by its `__name__`."""
    logger = logging.getLogger(name)
    logger.addFilter(_FirstRank())
    return logger
