"""DeepSpeed's ZeRO-2 and ZeRO-3 by accelerate and by transformers' Trainer; in `make test-trainers`.

Two processes on gloo. accelerate uses DeepSpeed with accelerators only, so that the tests set the backend.
The file is the script of each rank.
"""

import json
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="make test-trainers installs it", exc_type=ImportError)

RANKS = 2
MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}
OURS = {
    "everything": ALL,
    "recompute": {**MOVES, "recipe": "recompute"},
    "selective": {**MOVES, "recipe": "selective"},
    "budget": {**MOVES, "budget": "16GiB"},
}
STAGES = [2, 3]
WHO = ["accelerated", "frozen", "transformers_trainer"]

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


def ours(who):
    return {"everything": ALL} if who == "transformers_trainer" else OURS


def config(stage):
    """No weight persists or waits for its next use: each is gathered for each use, forward and backward."""
    sharded = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, **(sharded if stage == 3 else {})},
    }


def accelerated(folder, stage, settings, is_frozen=False):
    """accelerate's own loop. `left`: storages of gathered weights that a forward leaves for backward."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from cases import Transformer, make, tokens

    from ebbtide.integrations.accelerate import offload

    cpu = torch.device("cpu")
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = make(Transformer, cpu)
    if is_frozen:
        model.layers.requires_grad_(False)
        model.layers[0].norm.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sorted({p.numel() * p.element_size() for p in model.parameters()})
    handle = None
    if settings is not None and is_frozen:
        handle = offload(accelerator, model, **settings)  # before prepare()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.5))
    assert model.zero_optimization_stage() == stage
    if settings is not None and not is_frozen:
        handle = offload(accelerator, model, **settings)
    inner = accelerator.unwrap_model(model)
    gathered, losses, left, sent = [], [], [], []
    watch_gathered(inner, gathered)
    if handle is not None:
        listen(handle, sent)
    for step in range(8):
        with accelerator.accumulate(model):
            gathered.clear()
            loss = model(tokens(cpu, 10 * step + accelerator.process_index, length=7))
            left.append(len({storage() for storage in gathered} - {None}))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    again = 0 if handle is None else handle.stats().recomputed.count
    return {
        "losses": losses,
        "all_weights": weights_of(inner),
        "sent": sent,
        "again": again,
        "left": left,
        "sizes_of_weights": weights,
    }


def frozen(folder, stage, settings):
    return accelerated(folder, stage, settings, is_frozen=True)


def listen(handle, sent):
    """Listens to the sizes of parcels."""
    handle.subscribe(lambda event: sent.append(event.nbytes) if event.kind.name == "SENT" else None)


def watch_gathered(model, gathered):
    """After DeepSpeed's own hooks, with gathered parameters."""

    def note(module, args):
        gathered.extend(weakref.ref(p.untyped_storage()) for p in module.parameters(recurse=False) if p.numel())

    for module in model.modules():
        module.register_forward_pre_hook(note)


def transformers_trainer(folder, stage, settings):
    import torch
    from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    from ebbtide.integrations.transformers import OffloadCallback

    callback = OffloadCallback(**(settings or {}))
    sent = []

    class Listener(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            listen(callback.handle, sent)

    words = tokenizer()
    theirs = {**few_steps(folder), "use_cpu": False, "ddp_backend": "gloo", "gradient_accumulation_steps": 2}
    trainer = Trainer(
        language_model(),
        TrainingArguments(**theirs, deepspeed={**config(stage), "gradient_clipping": "auto"}),
        train_dataset=rows("text").map(lambda row: words(row["text"]), remove_columns=["text"]),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=[] if settings is None else [callback, Listener()],
    )
    torch.manual_seed(0)
    trainer.train()
    assert trainer.model_wrapped.zero_optimization_stage() == stage
    return {"losses": losses_of(trainer), "all_weights": weights_of(trainer.model), "sent": sent}


def weights_of(model):
    """All weights, bit for bit."""
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().contiguous().numpy().tobytes().hex() for p in parameters]


def main(folder):
    import deepspeed
    import torch
    from accelerate.state import AcceleratorState

    # DeepSpeed's shared-memory kernels for CPUs would have to be compiled: without them gloo carries all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    results = {}
    for stage in STAGES:
        for who in WHO:
            for name, settings in {"none": None, **ours(who)}.items():
                results[f"{who}-{stage}-{name}"] = globals()[who](folder, stage, settings)
                AcceleratorState._reset_state(reset_partial_state=True)
    Path(f"{folder}/{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo do not always end in good order with the interpreter


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, in processes as started by DeepSpeed's launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=1800)[1][-4000:] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", WHO)
def test_two_processes_compute_the_same(results, who, stage):
    for rank in results:
        twin = rank[f"{who}-{stage}-none"]
        assert len(set(twin["losses"])) > 1
        assert twin["sent"] == []
        for name in ours(who):
            run = rank[f"{who}-{stage}-{name}"]
            assert run["losses"] == twin["losses"]
            assert run["all_weights"] == twin["all_weights"]
            assert sum(run["sent"]) > 0
            assert (run.get("again", 0) > 0) == (name != "everything")


def test_both_stages_are_real(results):
    """Stage 2 has all weights on every rank, stage 3 none between forward and backward."""
    for rank in results:
        assert all(rank["accelerated-2-none"]["left"])
        assert not any(rank["accelerated-3-none"]["left"])


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("who", ["accelerated", "frozen"])
def test_gathered_weights_neither_travel_nor_stay(results, who, name):
    """No parcel has the size of a weight, and sizes equal those of stage 2."""
    for rank in results:
        run = rank[f"{who}-3-{name}"]
        assert set(run["sent"]).isdisjoint(run["sizes_of_weights"])
        if who == "accelerated":  # DeepSpeed's linear layers save their inputs for frozen weights too
            assert sorted(run["sent"]) == sorted(rank[f"{who}-2-{name}"]["sent"])
        assert not any(run["left"])


if __name__ == "__main__":
    main(*sys.argv[1:])
