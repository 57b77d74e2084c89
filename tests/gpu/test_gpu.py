"""Cases of the CPU run on an accelerator through public entry points; tests of streams, memory, captured graphs."""

import contextlib
import copy
import functools
import gc
import itertools
import random
import threading
import warnings

import pytest
import routing
import torch
from cases import (
    CASES,
    CHANGED,
    LAYOUTS,
    Block,
    Data,
    SaveAll,
    Transformer,
    finish,
    gradients,
    make,
    tokens,
    unpacked_layout,
)
from recipe_cases import CASES as RECIPE_CASES
from recipe_cases import RECIPES, Simple, Stack, train
from support import assert_equal, bits
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import ebbtide
from ebbtide import EventKind, Recipe
from ebbtide._types import Reason

if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Warnings of torch pass. Warnings of ebbtide, and exceptions in callbacks and finalizers, are errors.
    pytest.mark.filterwarnings(
        "ignore", "error::ebbtide.EbbtideWarning", "error::pytest.PytestUnraisableExceptionWarning"
    ),
]

GPU = torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture(autouse=True)
def _fresh_process():
    torch.cuda.set_device(GPU)
    yield
    torch.cuda.synchronize()
    gc.collect()
    ebbtide.release_memory()
    torch._dynamo.reset()


def settings(**other):
    """Everything moves: the window is one byte."""
    return {"store": "host", "host_limit": "4GiB", "window": 1, "prefetch": "1MiB", "min_bytes": 1, **other}


def new_context(**other):
    return ebbtide.offload_activations(**settings(**other))


def offload(model, **other):
    return ebbtide.offload(model, **settings(**other))


def check_moved(stats):
    assert stats.out.count > 0
    assert stats.inbound.count > 0


def check_at_rest(stats):
    gc.collect()
    assert stats().host_bytes == 0


def same(run, context, times=3):
    plain = run(contextlib.nullcontext())
    for _ in range(times):
        ours = run(context)
        torch.cuda.synchronize()
        assert_equal(ours, plain)
        del ours
    check_at_rest(context.stats)


class Tower(nn.Module):
    """Blocks without Python code that waits for the device."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads=4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batches(count: int, rows: int = 8, length: int = 128, width: int = 256) -> list[torch.Tensor]:
    data = Data(GPU, 5)
    return [data.tensor(rows, length, width) for _ in range(count)]


# -- cases of the CPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 400])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case_equals_its_plain_twin(case, window):
    context = new_context(window=window)
    same(lambda context: case(context, GPU), context)
    assert context.stats().out.count > 0
    if window == 1:
        check_moved(context.stats())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.__name__)
def test_recomputed_regions_equal_the_plain_run(case, recipe):
    plain = case(lambda model: None, GPU)
    handles = []
    ours = case(lambda model: handles.append(offload(model, recipe=RECIPES[recipe])), GPU)
    torch.cuda.synchronize()
    assert_equal(ours, plain)
    del ours
    gc.collect()
    for handle in handles:
        stats = handle.stats()
        assert stats.recomputed.count > 0
        assert stats.host_bytes == 0
        assert Reason.STORE_FULL not in stats.kept


def test_a_default_device_of_the_user_leaves_host_memory_alone():
    context = new_context()
    x = torch.randn(4, 8, device=GPU, requires_grad=True)
    with torch.device(GPU), context:
        y = x.sin().exp()
    y.sum().backward()
    assert context.stats().out.count > 0


def test_random_attention_is_saved_and_the_next_dropout_draws_equal_numbers():
    class Attends(Simple):
        def forward(self, x):
            q, k = (part(x).view(2, 64, 4, 32).transpose(1, 2).half() for part in (self.first, self.second))
            mixed = functional.scaled_dot_product_attention(q, k, q * k, dropout_p=0.2)
            return functional.dropout(mixed.transpose(1, 2).reshape(128, 128).float(), 0.3).sin() + x

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        results = []
        for recipe in (None, "selective", Recipe("selective", ops=("attention",), outputs="keep"), "recompute"):
            model = make(lambda: Stack(lambda: Attends(128)), GPU)
            handle = offload(model, recipe=recipe) if recipe is not None else None
            with sdpa_kernel(backend):
                results.append(train(model, lambda data: data.tensor(128, 128), GPU))
            if handle is not None:
                assert handle.stats().recomputed.count > 0
        for other in results[1:]:
            assert_equal(other, results[0])


class Flexible(nn.Module):
    """Attention with a score function in Python."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k))
        mixed = flex_attention(q, k, q * k, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01)
        return self.out(mixed.transpose(1, 2).flatten(2)) + x


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_flex_attention_is_saved(is_compiled, is_cast):
    results, parcels = [], []
    for ops in (None, ("convolution",), ("attention",)):
        torch._dynamo.reset()
        model = make(lambda: Stack(Flexible), GPU)
        handle = None if ops is None else offload(model, recipe=Recipe("selective", ops=ops))
        for layer in model.layers if is_compiled else ():
            layer.compile()
        around = functools.partial(torch.autocast, GPU.type, torch.bfloat16, enabled=is_cast)
        results.append(train(model, lambda data: data.tensor(4, 256, 256), GPU, around=around))
        parcels.append(0 if handle is None else handle.stats().parcels.count)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    assert parcels[2] > parcels[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_comes_back_unchanged(layout):
    context = new_context()
    for _ in range(2):
        got, wanted = unpacked_layout(context, GPU, layout)
        assert (got.dtype, got.device, got.shape, got.stride()) == (
            wanted.dtype, wanted.device, wanted.shape, wanted.stride(),
        )  # fmt: skip
        assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
        assert bits(got) == bits(wanted)
        del got
    assert context.stats().inbound.count > 0 or layout == "zero-size"
    check_at_rest(context.stats)


@pytest.mark.parametrize("changed", CHANGED, ids=lambda changed: changed.__name__)
def test_change_of_a_saved_tensor_raises_as_in_plain_autograd(changed):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(contextlib.nullcontext(), GPU).backward()
    context = new_context()
    for _ in range(2):
        loss = changed(context, GPU)
        torch.cuda.synchronize()  # landed copies must not hide the change
        with pytest.raises(ebbtide.ModifiedError, match=r"<root>.*version 0.*version 1"):
            loss.backward()
        del loss
    check_at_rest(context.stats)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_flash_attention(precision):
    """Backward of flash attention needs q, k, v, the output and the log-sum-exp with unchanged strides."""
    backends = [SDPBackend.FLASH_ATTENTION if precision is torch.bfloat16 else SDPBackend.MATH]

    def run(context):
        data = Data(GPU)
        x, w = data.leaf(4, 64, 128), data.leaf(128, 384)
        with context:
            qkv = (x @ w).to(precision).unflatten(-1, (3, 2, 64)).transpose(1, 3)
            with sdpa_kernel(backends):
                out = functional.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
            loss = out.transpose(1, 2).flatten(2).float().sin().exp().mean()
            del qkv, out
        return finish(loss, x, w)

    context = new_context()
    same(run, context)
    check_moved(context.stats())


# -- entry points and regions ------------------------------------------------------------------------------------------


def three_steps(model, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for step in range(3):
        loss = (model if call is None else call)(tokens(GPU, step))
        loss.backward()
        results += [loss.detach(), *(grad.clone() for grad in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [*results, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("choice", [{}, {"include": "layers.*.mlp"}, {"exclude": nn.Linear}, {"keep_last": 1}], ids=str)
def test_offload_of_a_module(choice):
    model = make(Transformer, GPU)
    handle = offload(model, **choice)
    assert_equal(three_steps(model), three_steps(make(Transformer, GPU)))
    check_moved(handle.stats())
    assert "fetched back" in handle.report()
    handle.remove()
    check_at_rest(handle.stats)


def test_two_models_of_different_width():
    models = [make(lambda: Tower(128, 3), GPU, 1), make(lambda: Tower(256, 2), GPU, 2)]
    twins = copy.deepcopy(models)
    handles = [offload(model) for model in models]

    def run(one, other):
        narrow, wide = batches(2, 4, 64, 128), batches(2, 4, 64, 256)
        for at in range(2):
            first, second = one(narrow[at]), other(wide[at])
            (first + second).backward()
        return [first.detach(), second.detach(), *gradients(one, other)]

    assert_equal(run(*models), run(*twins))
    for handle in handles:
        check_moved(handle.stats())
        check_at_rest(handle.stats)


def test_disk_store(tmp_path):
    model = make(Transformer, GPU)
    handle = offload(model, store=f"disk:{tmp_path}")
    assert_equal(three_steps(model), three_steps(make(Transformer, GPU)))
    check_moved(handle.stats())
    handle.remove()
    check_at_rest(handle.stats)


def test_disk_store_with_large_parcels(tmp_path):
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    handle = offload(model, store=f"disk:{tmp_path}", prefetch="16MiB", window="16MiB", min_bytes="64KiB")
    for batch in batches(3):
        ours, plain = finish(model(batch), model), finish(twin(batch), twin)
        torch.cuda.synchronize()
        assert_equal(ours, plain)
    check_moved(handle.stats())
    check_at_rest(handle.stats)


def test_host_limit_keeps_the_rest_on_the_device():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    handle = offload(model, host_limit="2MiB")
    for batch in batches(3):
        ours, plain = finish(model(batch), model), finish(twin(batch), twin)
        assert_equal(ours, plain)
    stats = handle.stats()
    assert stats.kept[Reason.STORE_FULL].count > 0
    assert 0 < stats.host_reserved_bytes <= 2 * MIB
    check_moved(stats)


def test_transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = make(lambda: transformers.LlamaForCausalLM(config), GPU)
    twin = copy.deepcopy(model)
    handle = offload(model)
    for step in range(3):
        batch = tokens(GPU, step, 2, 32, 64)
        ours = finish(model(input_ids=batch, labels=batch).loss, model)
        plain = finish(twin(input_ids=batch, labels=batch).loss, twin)
        torch.cuda.synchronize()
        assert_equal(ours, plain)
    assert len(handle.regions) == 3
    check_moved(handle.stats())


# -- streams and threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["all of it", "forward", "backward"])
def test_another_compute_stream(where):
    side = torch.cuda.Stream()

    def run(context):
        model = make(Tower, GPU)
        (batch,) = batches(1)
        side.wait_stream(torch.cuda.current_stream())
        forward = torch.cuda.stream(side) if where != "backward" else contextlib.nullcontext()
        with forward, context:
            torch.cuda._sleep(10_000_000)  # the device falls far behind the host
            loss = model(batch)
        backward = torch.cuda.stream(side) if where != "forward" else contextlib.nullcontext()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        with backward:
            loss.backward()
        torch.cuda.synchronize()
        return [loss.detach(), *gradients(model)]

    context = new_context(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


def test_streams_in_turns_within_one_forward():
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]

    def run(context):
        model = make(Tower, GPU)
        (x,) = batches(1)
        with context:
            for at, layer in enumerate(model.layers):
                side = sides[at % 2]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x = layer(x)
                torch.cuda.current_stream().wait_stream(side)
            loss = x.square().mean()
        loss.backward()
        torch.cuda.synchronize()
        return [loss.detach(), *gradients(model)]

    context = new_context(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


def test_memory_read_on_another_stream_is_not_reused_before():
    """Main and side stream save `x`; the side stream reads it late, when main has released it and asks for memory."""
    data, side = Data(GPU, 3), torch.cuda.Stream()
    weights = [data.tensor(1024, 1024) for _ in range(3)]
    origin = data.tensor(1024, 1024) * 0.1

    def run(context):
        leaves = [weight.clone().requires_grad_() for weight in weights]
        with context:
            x = origin.clone()
            mains = x * leaves[0]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)  # a tenth of a second
                aside = x * leaves[1]
            del x
            mains = (mains.exp() * leaves[2]).exp().sum()  # `x` leaves
        filled = [torch.full_like(weights[0], torch.nan) for _ in range(8)]
        torch.cuda.current_stream().wait_stream(side)
        loss = mains + aside.sum()
        del filled
        loss.backward()
        torch.cuda.synchronize()
        return [loss.detach(), aside.detach(), *(leaf.grad for leaf in leaves)]

    context = new_context()
    same(run, context)
    check_moved(context.stats())


def test_two_threads_share_an_engine():
    models = [make(Tower, GPU, seed) for seed in range(2)]
    twins = copy.deepcopy(models)
    context = new_context(prefetch="8MiB")
    steps = batches(4)
    results: dict[int, list[torch.Tensor]] = {}
    start = threading.Barrier(2)

    def work(rank):
        start.wait()
        with torch.cuda.stream(streams[rank]):
            results[rank] = train(models[rank], context)

    def train(model, context):
        losses = []
        for batch in steps:
            with context:
                loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients(model)]

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for rank, twin in enumerate(twins):
        assert_equal(results[rank], train(twin, contextlib.nullcontext()))
    check_moved(context.stats())


def test_no_memory_is_read_after_release():
    """Random sizes; the device is far behind the host; freed blocks are reused and overwritten at once."""
    choose = random.Random(0)
    plans = [
        (choose.choice([3, 64, 500, 1024, 2048]), [choose.randint(8, 700) for _ in range(choose.randint(2, 7))])
        for _ in range(30)
    ]
    context = new_context(prefetch="2MiB", window="1MiB")

    def run(context):
        results = []
        for step, (rows, widths) in enumerate(plans):
            data = Data(GPU, step)
            x = data.tensor(rows, widths[0])
            weights = [data.leaf(m, n) for m, n in itertools.pairwise(widths)]
            with context:
                for at, weight in enumerate(weights):
                    x = (x @ weight / weight.shape[0] ** 0.5).sin() * 1.5
                    if at % 3 == step % 3:
                        torch.cuda._sleep(2_000_000)
                    overwrite(x)
                loss = x.exp().mean()
                del x
            overwrite(loss)
            loss.backward()
            results += [loss.detach(), *(weight.grad for weight in weights)]
        torch.cuda.synchronize()
        return results

    def overwrite(like):
        """Fill freed blocks with NaN."""
        for _ in range(3):
            torch.full((like.numel(),), float("nan"), device=GPU)

    same(run, context, times=2)
    check_moved(context.stats())


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["compile first", "offload first"])
def test_blocks_compiled_one_by_one(order):
    torch._dynamo.utils.counters.clear()
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    if order == "offload first":
        handle = offload(model, prefetch="8MiB")
    for layer in (*model.layers, *twin.layers):
        layer.compile(fullgraph=True)
    if order == "compile first":
        handle = offload(model, prefetch="8MiB")
    for step, batch in enumerate(batches(4)):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            plain, ours = finish(twin(batch), twin), finish(model(batch), model)
        torch.cuda.synchronize()
        assert_equal(ours, plain)
    assert dict(torch._dynamo.utils.counters["graph_break"]) == {}
    assert {f"layers.{at}" for at in range(4)} <= {region for *_, region in handle._attachment.context._numbers}
    check_moved(handle.stats())
    check_at_rest(handle.stats)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("settings", [{"mode": "all", "window": "1MiB"}, {"budget": 0.9}])
def test_tensors_in_cuda_graphs_of_the_compiler_stay(settings, is_whole):
    """Moved or recomputed, each backward would be captured anew, or saved tensors be overwritten."""

    def steps(offloads):
        torch._dynamo.reset()
        model = make(Transformer, GPU)
        for layer in () if is_whole else model.layers:
            layer.compile(mode="reduce-overhead")
        call = torch.compile(model, mode="reduce-overhead") if is_whole else model
        handle = ebbtide.offload(model, min_bytes=1, **settings) if offloads else None
        results = []
        with warnings.catch_warnings():  # nothing in the graphs moves or is recomputed, and a warning says so
            warnings.simplefilter("ignore", ebbtide.EbbtideWarning)
            for step in range(12):
                model.zero_grad()
                results += [t.clone() for t in finish(call(tokens(GPU, step)), model)]
        return results, handle

    expected, _ = steps(False)
    results, handle = steps(True)
    assert_equal(results, expected)
    assert handle.stats().recomputed.count == 0
    assert handle.stats().kept[Reason.COMPILED_CAPTURE].count > 0


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_a_model_compiled_as_a_whole_is_planned(how):
    def steps(offloads):
        torch._dynamo.reset()
        model = make(Transformer, GPU)
        handle = ebbtide.offload(model, min_bytes=1, budget=0.9) if offloads and how == "torch.compile" else None
        call = model
        if how == "torch.compile":
            call = torch.compile(model, backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
            handle = ebbtide.offload(model, min_bytes=1, budget=0.9) if offloads else None
        losses = []
        for step in range(20):
            model.zero_grad()
            loss = call(tokens(GPU, step))
            loss.backward()
            losses.append(loss.detach().clone())
        return losses, handle

    expected, _ = steps(False)
    losses, handle = steps(True)
    assert_equal(losses, expected)  # all partitions have the kernels of eager mode
    assert list(handle.plan.regions) == ["(the model)"]


def test_context_around_compiled_blocks():
    model = make(Tower, GPU)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    steps = batches(3)

    def run(context):
        model.zero_grad()
        losses = []
        for batch in steps:
            with context:
                loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(grad.clone() for grad in gradients(model))]

    context = new_context(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


# -- memory and time ---------------------------------------------------------------------------------------------------


def roomy():
    """Default sizes in proportion to the model."""
    return {"window": "16MiB", "prefetch": "16MiB", "min_bytes": "64KiB"}


def test_the_host_never_waits_for_the_device():
    model = make(Tower, GPU)
    handle = offload(model, **roomy())
    steps = batches(5)
    for batch in steps[:2]:
        finish(model(batch), model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in steps[2:]:
            model.zero_grad()
            loss = model(batch)
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(bool(grad.isfinite().all()) for grad in gradients(model))
    check_moved(handle.stats())


def test_no_memory_is_taken_after_the_second_step():
    model = make(Tower, GPU)
    handle = offload(model, **roomy())
    pinned, reserved, allocated = [], [], []
    for batch in batches(6):
        loss = model(batch)
        loss.backward()
        del loss
        model.zero_grad()
        torch.cuda.synchronize()
        pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        reserved.append(handle.stats().host_reserved_bytes)
        allocated.append(torch.cuda.memory_allocated())
    assert pinned[2:] == pinned[1:2] * 4
    assert reserved[2:] == reserved[1:2] * 4
    assert allocated[2:] == allocated[1:2] * 4
    assert reserved[0] > 0
    check_moved(handle.stats())
    check_at_rest(handle.stats)


def test_peak_memory_is_really_lower():
    def peak(model):
        for batch in batches(3, rows=16, length=256):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(batch).backward()
            torch.cuda.synchronize()
            model.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    model = make(lambda: Tower(depth=8), GPU)
    plain = peak(model)
    handle = offload(model, **roomy())
    ours = peak(model)
    assert ours < 0.5 * plain
    check_moved(handle.stats())


def test_masks_travel_as_bits():
    """A mask moves as an eighth of its bytes; the mask is freed at once; every value comes back."""
    context = new_context(window="1MiB", prefetch="4MiB")

    def run(context):
        torch.manual_seed(0)
        data = Data(GPU)
        x, w = data.leaf(512, 1000), data.leaf(1000, 1000)
        y = x * 1.0
        with context:
            for _ in range(6):
                mask = torch.rand_like(y) > 0.3
                y = torch.where(mask, y @ w, 0.0).masked_fill(mask.flip(0), 0.5).tanh()
                del mask
            loss = functional.dropout(y, 0.5).square().mean()
        return finish(loss, x, w)

    same(run, context)
    packed = context.stats().packed
    assert packed.count == 3 * 13  # two masks per layer, one mask of dropout
    assert packed.nbytes == 3 * 13 * 512_000


def test_packing_a_mask_takes_and_leaves_little_on_the_device():
    mask_bytes = 512 * MIB
    x = Data(GPU).leaf(1)
    context = new_context(window="1GiB", min_bytes="1MiB")
    mask = torch.ones(mask_bytes, dtype=torch.bool, device=GPU)
    mask[::3] = False
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seen = []
    with context:
        loss = SaveAll.apply(x, seen, mask).sum()
    assert torch.cuda.max_memory_allocated() - before <= mask_bytes // 8 + 64 * MIB
    del mask
    assert torch.cuda.memory_allocated() <= before - mask_bytes + mask_bytes // 8 + MIB
    loss.backward()
    (got,) = seen
    assert int(got[::3].sum()) == 0
    assert int(got.sum()) == mask_bytes - (mask_bytes + 2) // 3
    del got, seen, loss
    check_at_rest(context.stats)


def test_packing_masks_never_waits_for_the_device():
    context = new_context()
    x = Data(GPU).leaf(64, 64)
    mask = Data(GPU).tensor(64, 64) > 0
    for mode in ("default", "default", "error"):  # the first steps allocate host memory
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with context:
                loss = x.masked_fill(mask.clone(), 1.0).exp().masked_fill(mask.clone(), 2.0).sin().sum()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert context.stats().packed.count == 6


def lines_that_wait(run):
    """Lines of tests/routing.py in which torch finds a synchronisation."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in seen if "called a synchronizing" in str(each.message)]
    return {each.lineno for each in waits if each.filename == routing.__file__}


def test_the_lines_that_wait_are_those_that_torch_finds(monkeypatch):
    torch.use_deterministic_algorithms(False)  # or some kernels wait on their own
    monkeypatch.setenv("EBBTIDE_SYNCS", "1")
    model, x = make(lambda: routing.Waiting(routing.maps_by_masks), GPU), Data(GPU, 5).tensor(256, 64)
    twin = copy.deepcopy(model)
    twin(x)
    expected = lines_that_wait(lambda: twin(x))
    with offload(model) as handle:
        finish(model(x).sum(), model)
        syncs = handle.stats().syncs
    lines = {kind: set() for kind, _, _ in syncs}
    for kind, _, line in syncs:
        lines[kind].add(int(line.rpartition(":")[2]))
    backward = lines.pop("boolean mask in backward")
    assert set().union(*lines.values()) == expected
    assert lines.keys() >= {"boolean mask", "repeat_interleave", "nonzero", ".item()"}
    assert lines.keys() >= {"copy to the host", "copy from the host"}
    assert len(backward) == 2  # of three selections one is of integers
    assert backward < lines["boolean mask"]


def test_maps_by_the_adapter_for_megatron_wait_for_nothing(monkeypatch):
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("EBBTIDE_SYNCS", "1")
    x, results, found = Data(GPU, 5).tensor(256, 64), [], []
    for maps in (routing.maps_by_masks, routing.sync_free_maps()):
        model = make(lambda maps=maps: routing.Routed(maps), GPU)
        with offload(model) as handle:
            results.append(finish(model(x).sum(), model))
            found.append(handle.stats().syncs)
    assert_equal(*results)
    assert found[0]
    assert found[1] == {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_kept_graph_does_not_collect_on_the_device():
    model = make(Tower, GPU)
    handle = offload(model, prefetch="4MiB")
    (batch,) = batches(1)
    model(batch).backward()  # the backward thread allocates permanent workspaces
    model.zero_grad()
    loss = model(batch)
    torch.cuda.synchronize()
    away = torch.cuda.memory_allocated()
    for _ in range(2):
        loss.backward(retain_graph=True)
        model.zero_grad()
        torch.cuda.synchronize()
        # The prefetch window and one parcel more. All saved tensors of the graph take ten times as much.
        assert torch.cuda.memory_allocated() - away <= 8 * MIB
    check_moved(handle.stats())


# -- the host far ahead of the device ----------------------------------------------------------------------------------


def test_figures_can_be_read_while_the_device_is_behind():
    """Compute events may be pending when the lane's events have passed: reading times must not query the former."""
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(24)]).to(GPU)
    x = torch.randn(8192, 4096, device=GPU, requires_grad=True)
    context = new_context(min_bytes="1MiB", window="1GiB", prefetch="1GiB", host_limit="8GiB")
    for _ in range(4):
        with context:
            loss = model(x).sum()
        context.stats()
        loss.backward()
        context.stats()
    torch.cuda.synchronize()
    assert context.stats().stall_backward_s >= 0.0
    check_moved(context.stats())


def test_a_long_run_reads_times_during_the_run():
    """Far more waits than the recorder keeps unread."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(120)]).to(GPU)
    x = torch.randn(4096, 512, device=GPU, requires_grad=True)
    context = new_context(min_bytes=1, window="64MiB", prefetch="64MiB")
    for _ in range(12):
        with context:
            loss = model(x).sum()
        loss.backward()
    check_moved(context.stats())


@pytest.mark.parametrize("offset", [1, 3, 4])
def test_a_column_block_gives_the_same_gradient(offset):
    """Alignment chooses the kernel, and the kernel chooses the order of a sum."""
    big = torch.randn(2048, 2048, device=GPU, dtype=torch.bfloat16, requires_grad=True)

    def run(context):
        weight = torch.ones(96, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        with context:
            loss = ((big * 1.5)[:, offset : offset + 96] @ weight).square().float().mean()
        loss.backward()
        return [weight.grad]

    plain = run(contextlib.nullcontext())
    context = new_context()
    for _ in range(2):
        assert_equal(run(context), plain)
    check_moved(context.stats())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_one_model_over_two_devices():
    """Each device has an engine, a pair of lanes and an autograd thread."""
    other = torch.device("cuda", 1)

    def run(context):
        torch.manual_seed(0)
        here = nn.Sequential(*[nn.Linear(256, 256, device=GPU) for _ in range(4)])
        there = nn.Sequential(*[nn.Linear(256, 256, device=other) for _ in range(4)])
        results = []
        for step in range(4):
            x = torch.full((512, 256), 0.1 * step, device=GPU)
            with context:
                loss = there(here(x).sin().to(other)).sin().square().mean()
            loss.backward()
            results.append(loss.detach().cpu())
        grads = [p.grad.cpu() for p in (*here.parameters(), *there.parameters())]
        return [*results, *grads]

    plain = run(contextlib.nullcontext())
    context = new_context()
    assert_equal(run(context), plain)
    assert_equal(run(context), plain)
    check_moved(context.stats())
    torch.cuda.synchronize(other)


# -- captured graphs ---------------------------------------------------------------------------------------------------


def one_step(model, batch, context):
    with context:
        loss = model(batch)
    loss.backward()
    return loss.detach()


def warm_up(model, batch, context):
    """Three steps on a side stream, as PyTorch requires before a capture. The engine allocates host memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            one_step(model, batch, context)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)


class Recorded:
    """A whole step, forward and backward, in one graph."""

    def __init__(self, model, context, step=one_step, rows=8, length=128):
        self.model = model
        (self.batch,) = batches(1, rows, length)
        warm_up(model, self.batch, context)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(model, self.batch, context)

    def __call__(self, batch):
        self.batch.copy_(batch)
        self.graph.replay()
        torch.cuda.synchronize()
        return [self.loss, *gradients(self.model)]


def plain_step(twin, batch):
    twin.zero_grad(set_to_none=True)
    return finish(twin(batch), twin)


def pinned_allocations():
    return torch.cuda.host_memory_stats()["num_host_alloc"]


def captured_memory(context):
    """Host memory of the captures of a context."""
    engines = context._engines
    return [memory for captured in engines._captures.values() for memory in captured.store._memory]


@pytest.mark.parametrize(
    ("sizes", "happens"),
    [
        ({"window": 1, "prefetch": "8MiB"}, {EventKind.RELEASED, EventKind.FETCHED}),
        ({"window": 1, "prefetch": 1}, {EventKind.RELEASED, EventKind.MISSED}),
        ({"window": "6MiB", "prefetch": "4MiB"}, {EventKind.RELEASED}),
        ({"window": "16MiB", "prefetch": "16MiB", "min_bytes": "64KiB"}, {EventKind.RELEASED, EventKind.FETCHED}),
    ],
    ids=["release at once", "no prefetch", "some waits", "small tensors too"],
)
@pytest.mark.parametrize("kind", ["context", "handle"])
def test_a_whole_step_in_one_graph(kind, sizes, happens):
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = contextlib.nullcontext()
    if kind == "context":
        context = watched = new_context(**sizes)
    else:
        watched = offload(model, **sizes)
    (batch,) = batches(1)
    warm_up(model, batch, context)
    seen = set()
    unsubscribe = watched.subscribe(lambda event: seen.add(event.kind))
    before, pinned = watched.stats(), pinned_allocations()
    graph, static = torch.cuda.CUDAGraph(), batch.clone()
    with torch.cuda.graph(graph):
        loss = one_step(model, static, context)
    unsubscribe()
    after = watched.stats()
    assert happens <= seen
    assert after.out.nbytes > before.out.nbytes
    assert after.inbound.nbytes > before.inbound.nbytes
    assert Reason.CAPTURING not in after.kept
    assert Reason.CAPTURE_FULL not in after.kept
    for batch in batches(4):
        static.copy_(batch)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal([loss, *gradients(model)], plain_step(twin, batch))
    assert pinned_allocations() == pinned
    stats = watched.stats()
    assert stats.host_bytes == stats.host_captured_bytes > 0
    assert stats.host_reserved_bytes == before.host_reserved_bytes
    assert stats.out == after.out  # replays are not counted


@pytest.mark.parametrize(
    ("recipe", "moves"),
    [
        ("recompute", True),
        (ebbtide.Recipe("recompute", inputs="keep"), False),
        ("selective", True),
        (ebbtide.Recipe("selective", outputs="keep"), True),
        ({"layers.*": "selective", "layers.0": "keep", "layers.1": "recompute"}, True),
    ],
    ids=str,
)
def test_a_whole_step_with_recipes_in_one_graph(recipe, moves):
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=recipe, prefetch="4MiB", include="layers.*")
    recorded = Recorded(model, contextlib.nullcontext())
    stats = handle.stats()
    assert stats.recomputed.count > 0
    assert (stats.host_captured_bytes > 0) == moves
    for batch in batches(4):
        assert_equal(recorded(batch), plain_step(twin, batch))


def test_a_region_with_random_numbers_is_not_recomputed_in_a_graph():
    model = make(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Dropout()) for _ in range(2))), GPU)
    offload(model, recipe="recompute")
    batch = torch.randn(512, 512, device=GPU)
    with pytest.raises(ebbtide.CaptureError, match="random numbers"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(batch).sum().backward()
    torch.cuda.synchronize()
    model(batch).sum().backward()  # works outside of a graph


def test_replays_copy_bytes_to_the_host():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = new_context(prefetch="4MiB")
    recorded = Recorded(model, context)
    memories = captured_memory(context)
    assert memories
    for batch in batches(2):
        for memory in memories:
            memory.fill_(0xFF)
        assert_equal(recorded(batch), plain_step(twin, batch))
        assert all(bool((memory != 0xFF).any()) for memory in memories)


def test_eager_steps_and_replays_in_turns():
    model, eager = make(Tower, GPU), make(Tower, GPU, 1)
    twin, eager_twin = copy.deepcopy(model), copy.deepcopy(eager)
    context = new_context(prefetch="8MiB")
    recorded = Recorded(model, context)
    for batch in batches(4):
        recorded.batch.copy_(batch)
        eager.zero_grad()
        recorded.graph.replay()  # the device is far behind when the eager step reuses host memory
        loss = one_step(eager, batch, context)
        recorded.graph.replay()
        torch.cuda.synchronize()
        assert_equal([recorded.loss, *gradients(model)], plain_step(twin, batch))
        assert_equal([loss, *gradients(eager)], plain_step(eager_twin, batch))
    context.stats()


def test_two_graphs_replayed_in_turns():
    models = [make(Tower, GPU, seed) for seed in range(2)]
    twins = copy.deepcopy(models)
    context = new_context(prefetch="4MiB")
    recorded = [Recorded(model, context, rows=rows) for model, rows in zip(models, (8, 4), strict=True)]
    memories = captured_memory(context)
    ranges = sorted((memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in memories)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for wide, narrow in zip(batches(3), batches(3, rows=4), strict=True):
        assert_equal(recorded[0](wide), plain_step(twins[0], wide))
        assert_equal(recorded[1](narrow), plain_step(twins[1], narrow))
    for graph in [one.graph for one in recorded] * 2:  # without a pause
        graph.replay()
    torch.cuda.synchronize()
    assert_equal([recorded[0].loss, *gradients(models[0])], plain_step(twins[0], batches(3)[-1]))
    assert_equal([recorded[1].loss, *gradients(models[1])], plain_step(twins[1], batches(3, rows=4)[-1]))


def test_accumulation_in_one_graph():
    def two_micro_batches(model, batch, context):
        losses = [one_step(model, part, context) for part in batch.chunk(2)]
        return torch.stack(losses)

    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    recorded = Recorded(model, new_context(prefetch="4MiB"), two_micro_batches)
    for batch in batches(3):
        twin.zero_grad(set_to_none=True)
        plain = two_micro_batches(twin, batch, contextlib.nullcontext())
        assert_equal(recorded(batch), [plain, *gradients(twin)])


def test_compiled_blocks_in_one_graph():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    handle = offload(model, prefetch="8MiB")
    for layer in (*model.layers, *twin.layers):
        layer.compile(fullgraph=True)
    recorded = Recorded(model, contextlib.nullcontext())
    for batch in batches(3):
        assert_equal(recorded(batch), plain_step(twin, batch))
    check_moved(handle.stats())


def test_several_streams_in_one_graph():
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]

    def forked(model, x, context):
        with context:
            for at, layer in enumerate(model.layers):
                side = sides[at % 2]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x = layer(x)
                torch.cuda.current_stream().wait_stream(side)
            loss = x.square().mean()
        loss.backward()
        return loss.detach()

    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = new_context(prefetch="8MiB")
    recorded = Recorded(model, context, forked)
    for batch in batches(3):
        assert_equal(recorded(batch), plain_step(twin, batch))


def test_a_graph_that_is_kept_beyond_its_capture():
    """All lanes are joined: else the capture could not end. Tensors saved in the capture cannot be unpacked outside."""
    kept = []

    def twice(model, batch, context):
        with context:
            loss = model(batch)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        kept.append(loss)
        return loss.detach()

    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = new_context(prefetch="4MiB")
    recorded = Recorded(model, context, twice)
    for batch in batches(2):
        twin.zero_grad(set_to_none=True)
        loss = twice(twin, batch, contextlib.nullcontext())
        kept.pop()
        assert_equal(recorded(batch), [loss, *gradients(twin)])
    with pytest.raises(ebbtide.CaptureError, match="needed outside of that capture"):
        kept[0].backward()
    kept.clear()
    gc.collect()
    (batch,) = batches(1)
    one_step(make(Tower, GPU, 1), batch, context)


def test_an_eager_graph_needed_in_a_capture():
    model = make(Tower, GPU)
    context = new_context()
    (batch,) = batches(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with context:
            loss = model(batch)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.graph(graph, stream=side),
            pytest.raises(ebbtide.CaptureError, match="saved outside of the graph"),
        ):
            loss.backward()
        del loss
    torch.cuda.synchronize()


def test_an_eager_graph_that_dies_in_a_capture():
    model, other = make(Tower, GPU), make(Tower, GPU, 1)
    twin = copy.deepcopy(model)
    context, roomy_context = new_context(prefetch="8MiB"), new_context(window="1GiB")
    side = torch.cuda.Stream()
    (batch,) = batches(1)
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            one_step(model, batch, context)
        model.zero_grad(set_to_none=True)
        with roomy_context:
            older = other(batch)  # all parcels sent, none released: the graph dies with pending copies
        with torch.cuda.graph(graph, stream=side):
            del older
            loss = one_step(model, batch, context)
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal([loss, *gradients(model)], plain_step(twin, batch))


def test_captured_memory_is_really_lower():
    def pool_bytes(model, context):
        (batch,) = batches(1, rows=16, length=256)
        warm_up(model, batch, context)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_step(model, batch, context)
        model.zero_grad(set_to_none=True)
        return torch.cuda.memory_reserved() - before

    model = make(lambda: Tower(depth=8), GPU)
    plain = pool_bytes(model, contextlib.nullcontext())
    torch.cuda.empty_cache()
    context = new_context(**roomy())
    ours = pool_bytes(model, context)
    assert ours < 0.7 * plain
    check_moved(context.stats())


def test_without_a_warm_up_step_all_tensors_of_a_capture_stay():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    (batch,) = batches(1)
    warm_up(model, batch, contextlib.nullcontext())
    context = new_context()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.warns(ebbtide.EbbtideWarning, match="run a step with the same settings before"),
        torch.cuda.graph(graph),
    ):
        loss = one_step(model, batch, context)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal([loss, *gradients(model)], plain_step(twin, batch))
    stats = context.stats()
    assert stats.kept[Reason.CAPTURE_FULL].count > 0
    assert stats.out.count == stats.host_reserved_bytes == 0


class Waves(nn.Module):
    """Blocks to be captured one by one, each followed by eager operators with saved tensors."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads=4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin().exp().cos()
        return x.square().mean()


def graphed_layers(model):
    samples = tuple((batch.requires_grad_(),) for batch in batches(len(model.layers)))
    torch.cuda.make_graphed_callables(tuple(model.layers), samples)
    model.zero_grad(set_to_none=True)


def test_context_around_graphed_callables():
    model = make(Waves, GPU)
    twin = copy.deepcopy(model)
    graphed_layers(model)
    context = new_context(prefetch="8MiB")
    for batch in batches(4):
        batch.requires_grad_()
        model.zero_grad(set_to_none=True)
        loss = one_step(model, batch, context)
        torch.cuda.synchronize()
        assert_equal([loss, *gradients(model)], plain_step(twin, batch))
    check_moved(context.stats())


def test_context_around_the_making_of_graphed_callables():
    """make_graphed_callables captures forward and backward separately: nothing may move."""
    model = make(Waves, GPU)
    twin = copy.deepcopy(model)
    context = new_context(prefetch="8MiB")
    with context:
        graphed_layers(model)
    assert context.stats().kept[Reason.CAPTURING].count > 0
    for batch in batches(3):
        batch.requires_grad_()
        model.zero_grad(set_to_none=True)
        loss = one_step(model, batch, contextlib.nullcontext())
        torch.cuda.synchronize()
        assert_equal([loss, *gradients(model)], plain_step(twin, batch))
