"""Loggers below `ebbtide`: only rank 0 writes records, and handlers are left to the program."""

import logging

import torch


class _FirstRank(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (the rank alone decides)
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def logger_of(name: str) -> logging.Logger:
    """Logger of the module with `__name__` equal to `name`."""
    logger = logging.getLogger(name)
    logger.addFilter(_FirstRank())
    return logger
