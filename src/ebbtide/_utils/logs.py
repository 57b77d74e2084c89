"""Loggers below `ebbtide`: only rank 0 writes records, and handlers are left to the program."""

import logging

import torch


def logger_of(name: str) -> logging.Logger:
    """Logger of the module with `__name__` equal to `name`."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_first_rank)
    return logger


def _is_first_rank(_: logging.LogRecord) -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
