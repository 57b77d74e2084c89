"""Runs a script for Megatron-Core on the CPU: `python on_the_cpu.py SCRIPT`, under torchrun."""

import runpy
import sys

from tiny_megatron import megatron_on_the_cpu

if __name__ == "__main__":
    del sys.argv[0]
    with megatron_on_the_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
