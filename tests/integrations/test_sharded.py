"""Two processes on gloo against a twin: accelerate and Fabric with DDP and FSDP2, the Trainers of transformers and
Lightning with FSDP2, and a plain loop with FSDP1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RANKS = 2
ALL = {"store": "mock", "min_bytes": 1, "mode": "all", "window": "1KiB"}


def shard_on_the_cpu():
    """accelerate shards on accelerators only: processes on CPUs silently go without the FSDP plugin."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def accelerated(is_offloaded, folder, kind):
    """Losses, weights and moved bytes of accelerate's own loop."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from cases import Transformer, make, tokens

    from ebbtide.integrations.accelerate import offload

    plugin = None
    if kind == "fsdp2":
        shard_on_the_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = make(Transformer, torch.device("cpu"))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    handle = offload(accelerator, model, **ALL) if is_offloaded else None
    losses = []
    for step in range(6):
        with accelerator.accumulate(model):
            loss = model(tokens(torch.device("cpu"), 10 * step + accelerator.process_index))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    sharded = sum(type(p).__name__ == "DTensor" for p in model.parameters())
    return losses, weights_of(model), 0 if handle is None else handle.stats().out.nbytes, sharded


def transformers_trainer(is_offloaded, folder, kind):
    import torch
    from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    from ebbtide.integrations.transformers import OffloadCallback

    callback = OffloadCallback(**ALL)
    seen = [0]

    class Watcher(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(0 if callback.handle is None else callback.handle.stats().out.nbytes)

    words = tokenizer()
    arguments = TrainingArguments(
        **few_steps(folder),
        gradient_accumulation_steps=2,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    shard_on_the_cpu()
    trainer = Trainer(
        language_model(),
        arguments,
        train_dataset=rows("text").map(lambda row: words(row["text"]), remove_columns=["text"]),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=[callback, Watcher()] if is_offloaded else [],
    )
    torch.manual_seed(0)
    trainer.train()
    sharded = sum(type(p).__name__ == "DTensor" for p in trainer.model.parameters())
    return losses_of(trainer), weights_of(trainer.model), seen[-1], sharded


def sharded_by_block(model, mesh):
    """A strategy with settings of a user. The mesh also has a dimension for tensor parallelism, of one process."""
    from torch.distributed.fsdp import fully_shard

    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def fabric(is_offloaded, folder, kind):
    import lightning
    import torch
    from cases import Transformer, make, tokens
    from lightning.fabric.strategies import ModelParallelStrategy

    import ebbtide

    strategy = "ddp" if kind == "ddp" else ModelParallelStrategy(sharded_by_block)
    runs = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    runs.launch()
    model = runs.setup_module(make(Transformer, torch.device("cpu")))
    optimizer = runs.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    handle = ebbtide.offload(model, **ALL) if is_offloaded else None
    losses = []
    for step in range(4):
        loss = model(tokens(torch.device("cpu"), 10 * step + runs.global_rank))
        runs.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sharded = sum(type(p).__name__ == "DTensor" for p in model.parameters())
    return losses, weights_of(model), 0 if handle is None else handle.stats().out.nbytes, sharded


def lightning_trainer(is_offloaded, folder, kind):
    import lightning.pytorch
    import torch
    from cases import Transformer, make, tokens
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ebbtide.integrations.lightning import OffloadCallback

    losses = []

    class Task(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make(Transformer, torch.device("cpu"))

        def configure_model(self):
            sharded_by_block(self.model, self.device_mesh)

        def training_step(self, batch, index):
            loss = self.model(batch[0])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    task = Task()
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(),
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[OffloadCallback(**ALL)] if is_offloaded else [],
    )
    batches = [tokens(torch.device("cpu"), seed) for seed in range(4 * RANKS)]
    trainer.fit(task, torch.utils.data.DataLoader(batches))
    moved = trainer.callback_metrics.get("ebbtide/moved_gib", 0)
    sharded = sum(type(p).__name__ == "DTensor" for p in task.parameters())
    return losses, weights_of(task), float(moved), sharded


def plain_loop(is_offloaded, folder, kind):
    """FSDP1 wraps the recomputed modules: parameters are gathered inside, for backward before the recomputation."""
    import torch
    from cases import Block, Transformer, make, tokens
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import ebbtide

    torch.distributed.init_process_group("gloo")
    model = FullyShardedDataParallel(
        make(Transformer, torch.device("cpu")),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=kind == "fsdp1",
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = ebbtide.offload(model, **ALL, recipe="recompute") if is_offloaded else None
    losses = []
    for step in range(4):
        loss = model(tokens(torch.device("cpu"), 10 * step + torch.distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(model), 0 if handle is None else handle.stats().out.nbytes, 0


def weights_of(model):
    """The part of each tensor on this rank, bit for bit."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [p.detach().contiguous().numpy().tobytes().hex() for p in local]


def main(run, kind, is_offloaded, folder):
    import torch

    torch.set_num_threads(1)
    result = globals()[run](is_offloaded == "True", folder, kind)
    Path(f"{folder}/{is_offloaded}{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo do not always end in order with the interpreter


def launched(run, kind, is_offloaded, folder, port):
    """Results of each rank, of processes started in the manner of torchrun."""
    paths = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        **({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if kind == "fsdp2" else {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, run, kind, str(is_offloaded), str(folder)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=1800)[1] for process in processes]  # a dead process holds up the rest
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, errors
    return [json.loads((folder / f"{is_offloaded}{rank}.json").read_text()) for rank in range(RANKS)]


def a_free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        ("accelerated", "ddp"),
        ("accelerated", "fsdp2"),
        ("transformers_trainer", "fsdp2"),
        ("fabric", "ddp"),
        ("fabric", "fsdp2"),
        ("lightning_trainer", "fsdp2"),
        ("plain_loop", "fsdp1"),
        ("plain_loop", "fsdp1 with flat parameters"),
    ],
)
def test_two_processes_compute_equal_results(tmp_path, run, kind):
    ours = launched(run, kind, True, tmp_path, a_free_port())
    twin = launched(run, kind, False, tmp_path, a_free_port())
    for (losses, weights, moved, sharded), (expected, same, _, _) in zip(ours, twin, strict=True):
        assert losses == expected
        assert weights == same
        assert moved > 0
        assert (sharded == len(weights)) == (kind == "fsdp2")


if __name__ == "__main__":
    main(*sys.argv[1:])
