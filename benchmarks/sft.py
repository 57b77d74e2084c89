"""Supervised fine-tuning in TRL's trainer, on random weights with the shapes of Qwen3 1.7B and random tokens.

All modes take turns in one process. Each turn is a new trainer.
"""

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from benchmarks.measure import spread
from ebbtide import compat
from ebbtide._utils.sizes import GIB
from ebbtide.integrations.transformers import OffloadCallback

_ROUNDS = 3
_WARM_UP = 4
_SETTLING = 14  # steps in which a planner measures, plans and corrects the plan
_EQUAL_STEPS = 20
_NO_CHECKPOINTS = {"gradient_checkpointing": False}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a batch."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    batch: int
    tokens: int


QWEN = Sizes(2048, 6144, 28, 16, 8, 128, 151936, batch=2, tokens=8192)
TINY = Sizes(64, 128, 4, 4, 2, 16, 96, batch=2, tokens=64)


def measure_full(sizes: Sizes, device: torch.device, count: int) -> dict[str, object]:
    """Measure checkpointing alone, with TRL's offloading, and with ebbtide instead of TRL's offloading.

    Compare the losses of the first and the last mode step by step, under deterministic algorithms.

    Args:
        count: steps to time in each round.
    """
    offloading = {"activation_offloading": True}
    modes: dict[str, Callable[[int, torch.nn.Module], _StepRecords]] = {
        "checkpoint": lambda steps, model: _train(sizes, model, steps),
        "checkpoint, TRL's offloading": lambda steps, model: _train(sizes, model, steps, offloading),
        "checkpoint, ebbtide": lambda steps, model: _train_installed(sizes, model, steps, offloading),
    }
    if device.type == "cpu":
        del modes["checkpoint, TRL's offloading"]  # needs an accelerator
    model = _model(sizes, device)
    timed: dict[str, list[_StepRecords]] = {name: [] for name in modes}
    for _ in range(_ROUNDS):
        for name, train in modes.items():
            timed[name].append(train(_WARM_UP + count, model))
    summaries = {name: _summary(turns) for name, turns in timed.items()}
    with _deterministic():
        losses = {
            name: modes[name](_EQUAL_STEPS, _model(sizes, device)).losses
            for name in ("checkpoint", "checkpoint, ebbtide")
        }
    equal = sum(plain == ours for plain, ours in zip(*losses.values(), strict=True))
    return {"modes": summaries, "equal_losses": equal, "steps_compared": _EQUAL_STEPS, "losses": losses}


def measure_adapter(sizes: Sizes, device: torch.device, count: int, **settings: object) -> dict[str, object]:
    """Measure LoRA on all linear layers without checkpointing: plain, and with an ebbtide plan without a budget.

    Args:
        count: steps to time in each round.
        settings: settings of the callback.
    """
    import peft

    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(_model(sizes, device), adapter)
    plain: list[_StepRecords] = []
    ours: list[_StepRecords] = []
    with tempfile.TemporaryDirectory() as folder:
        settings["profile"] = f"{folder}/profile.json"
        _train(sizes, model, _SETTLING, _NO_CHECKPOINTS, OffloadCallback(**settings))  # writes the profile
        for _ in range(_ROUNDS):
            plain.append(_train(sizes, model, _WARM_UP + count, _NO_CHECKPOINTS))
            ours.append(_train(sizes, model, _WARM_UP + count, _NO_CHECKPOINTS, OffloadCallback(**settings)))
    return {"modes": {"nothing": _summary(plain), "auto": _summary(ours)}}


class _StepRecords(TrainerCallback):
    """Records times of steps, the peak of device memory after the warm-up, moved bytes, and losses."""

    def __init__(self, offload: OffloadCallback | None) -> None:
        self.step_ms: list[float] = []
        self.losses: list[float] = []
        self.moved_bytes: list[int] = []
        self.peak_bytes = 0
        self._offload = offload
        self._start = 0.0

    def on_step_begin(self, args, state, control, **_) -> None:
        if len(self.step_ms) == _WARM_UP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        _settle()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **_) -> None:
        _settle()
        self.step_ms.append((time.perf_counter() - self._start) * 1e3)
        if torch.cuda.is_available():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self._offload is not None:
            assert self._offload.handle is not None
            self.moved_bytes.append(self._offload.handle.stats().out.nbytes)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _train_installed(sizes: Sizes, model: torch.nn.Module, steps: int, settings: dict[str, Any]) -> _StepRecords:
    with compat.install("trl"):
        return _train(sizes, model, steps, settings)


def _train(
    sizes: Sizes,
    model: torch.nn.Module,
    steps: int,
    settings: dict[str, Any] | None = None,
    offload: OffloadCallback | None = None,
) -> _StepRecords:
    import trl

    records = _StepRecords(offload)

    class RecordingTrainer(trl.SFTTrainer):
        """TRL's trainer, recording the loss of every step."""

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            records.losses.append(loss.item())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=sizes.batch,
            max_steps=steps,
            max_length=sizes.tokens,
            bf16=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            use_cpu=not torch.cuda.is_available(),
            **(settings or {}),
        )
        trainer = RecordingTrainer(
            model,
            arguments,
            train_dataset=_rows(sizes, steps * sizes.batch),
            processing_class=_tokenizer(sizes),
            callbacks=[records] if offload is None else [offload, records],
        )
        trainer.train()
    del trainer
    gc.collect()
    return records


def _model(sizes: Sizes, device: torch.device) -> torch.nn.Module:
    config = Qwen3Config(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.tokens,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def _rows(sizes: Sizes, count: int) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, sizes.vocab, (count, sizes.tokens), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def _tokenizer(sizes: Sizes) -> PreTrainedTokenizerFast:
    """Make a tokenizer for the trainer; the rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _summary(turns: list[_StepRecords]) -> dict[str, object]:
    turns_ms = [turn.step_ms[_WARM_UP:] for turn in turns]
    summary: dict[str, object] = {
        "step_ms": spread([ms for turn_ms in turns_ms for ms in turn_ms]),
        "turns_ms": list(map(statistics.median, turns_ms)),
        "peak_gib": max(turn.peak_bytes for turn in turns) / GIB,
    }
    if turns[-1].moved_bytes:
        summary["moved_bytes_in_a_step"] = turns[-1].moved_bytes[-1] - turns[-1].moved_bytes[-2]
    return summary


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
