"""Runs examples in turn, each in a fork of one process with the slow imports.

python run_examples.py < lines of JSON: the folder, the script, options of torchrun or null, the arguments. The output
is in `out` in the folder, the exit status in `code`.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch

PACKAGES = ("accelerate", "diffusers", "lightning.pytorch", "peft", "transformers", "trl")


def run(folder, script, torchrun, arguments):
    """Run in the present process, which ends with the script. torchrun starts processes of its own."""
    code = 1
    try:
        os.chdir(folder)
        out = os.open("out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if torchrun is not None:
            importlib.import_module("torch.distributed.run").main([*torchrun, script, *arguments])
            code = 0
            return
        sys.argv = [script, *arguments]
        torch.manual_seed(0)  # by chance, losses of an example without a seed would be equal as printed
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:  # a SystemExit with a code is a failure too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    for package in PACKAGES:
        importlib.import_module(package)
    for line in sys.stdin:
        folder, *command = json.loads(line)
        child = os.fork()
        if child == 0:
            run(folder, *command)
        _, status = os.waitpid(child, 0)
        (Path(folder) / "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
