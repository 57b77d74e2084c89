"""The cases of the CPU on an accelerator, through the public doors; and what only an accelerator can show."""

import contextlib
import copy
import functools
import gc
import itertools
import random
import threading

import pytest
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
from ebbtide.types import Reason

if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # torch warns about what it does itself; ours, and what is raised where nobody can catch it, are errors.
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
    """Everything moves: the window holds next to nothing."""
    return {"store": "host", "host_limit": "4GiB", "window": 1, "prefetch": "1MiB", "min_bytes": 1, **other}


def door(**other):
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
    """Blocks of some size without a word of Python that waits for the device."""

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


# -- the same cases as on the CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 400])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case_equals_its_plain_twin(case, window):
    context = door(window=window)
    same(lambda door: case(door, GPU), context)
    assert context.stats().out.count > 0
    if window == 1:
        check_moved(context.stats())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.__name__)
def test_regions_that_run_again_equal_the_plain_run(case, recipe):
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
    context = door()
    x = torch.randn(4, 8, device=GPU, requires_grad=True)
    with torch.device(GPU), context:
        y = x.sin().exp()
    y.sum().backward()
    assert context.stats().out.count > 0


def test_attention_that_draws_random_numbers_is_held_and_the_next_dropout_stays_in_step():
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
    """Attention that is written as a function."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k))
        mixed = flex_attention(q, k, q * k, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01)
        return self.out(mixed.transpose(1, 2).flatten(2)) + x


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_flex_attention_is_held(is_compiled, is_cast):
    results, saves = [], []
    for ops in (None, ("convolution",), ("attention",)):
        torch._dynamo.reset()
        model = make(lambda: Stack(Flexible), GPU)
        handle = None if ops is None else offload(model, recipe=Recipe("selective", ops=ops))
        for layer in model.layers if is_compiled else ():
            layer.compile()
        around = functools.partial(torch.autocast, GPU.type, torch.bfloat16, enabled=is_cast)
        results.append(train(model, lambda data: data.tensor(4, 256, 256), GPU, around=around))
        saves.append(0 if handle is None else handle.stats().parcels.count)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    assert saves[2] > saves[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_comes_back_as_it_was(layout):
    context = door()
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
def test_change_after_a_save_raises_as_it_does_without_us(changed):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(contextlib.nullcontext(), GPU).backward()
    context = door()
    for _ in range(2):
        loss = changed(context, GPU)
        torch.cuda.synchronize()  # all copies have landed: that must not matter
        with pytest.raises(ebbtide.ModifiedError, match=r"<root>.*version 0.*version 1"):
            loss.backward()
        del loss
    check_at_rest(context.stats)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_flash_attention(precision):
    """Its backward wants q, k, v, the result and the sums with their very strides."""
    backends = [SDPBackend.FLASH_ATTENTION if precision is torch.bfloat16 else SDPBackend.MATH]

    def run(door):
        data = Data(GPU)
        x, w = data.leaf(4, 64, 128), data.leaf(128, 384)
        with door:
            qkv = (x @ w).to(precision).unflatten(-1, (3, 2, 64)).transpose(1, 3)
            with sdpa_kernel(backends):
                out = functional.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
            loss = out.transpose(1, 2).flatten(2).float().sin().exp().mean()
            del qkv, out
        return finish(loss, x, w)

    context = door()
    same(run, context)
    check_moved(context.stats())


# -- doors and regions -------------------------------------------------------------------------------------------------


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
def test_module_door(choice):
    model = make(Transformer, GPU)
    handle = offload(model, **choice)
    assert_equal(three_steps(model), three_steps(make(Transformer, GPU)))
    check_moved(handle.stats())
    assert "fetched back" in handle.report()
    handle.remove()
    check_at_rest(handle.stats)


def test_two_models_of_which_one_is_offloaded_twice_as_wide():
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

    def run(door):
        model = make(Tower, GPU)
        (batch,) = batches(1)
        side.wait_stream(torch.cuda.current_stream())
        forward = torch.cuda.stream(side) if where != "backward" else contextlib.nullcontext()
        with forward, door:
            torch.cuda._sleep(10_000_000)  # the device falls far behind the host
            loss = model(batch)
        backward = torch.cuda.stream(side) if where != "forward" else contextlib.nullcontext()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        with backward:
            loss.backward()
        torch.cuda.synchronize()
        return [loss.detach(), *gradients(model)]

    context = door(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


def test_streams_in_turns_within_one_forward():
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]

    def run(door):
        model = make(Tower, GPU)
        (x,) = batches(1)
        with door:
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

    context = door(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


def test_two_threads_share_an_engine():
    models = [make(Tower, GPU, seed) for seed in range(2)]
    twins = copy.deepcopy(models)
    context = door(prefetch="8MiB")
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


def test_no_memory_is_used_after_it_was_given_away():
    """Sizes of all kinds, the device far behind the host, and freed blocks taken and spoilt at once."""
    choose = random.Random(0)
    plans = [
        (choose.choice([3, 64, 500, 1024, 2048]), [choose.randint(8, 700) for _ in range(choose.randint(2, 7))])
        for _ in range(30)
    ]
    context = door(prefetch="2MiB", window="1MiB")

    def run(door):
        results = []
        for step, (rows, widths) in enumerate(plans):
            data = Data(GPU, step)
            x = data.tensor(rows, widths[0])
            weights = [data.leaf(m, n) for m, n in itertools.pairwise(widths)]
            with door:
                for at, weight in enumerate(weights):
                    x = (x @ weight / weight.shape[0] ** 0.5).sin() * 1.5
                    if at % 3 == step % 3:
                        torch.cuda._sleep(2_000_000)
                    spoil(x)
                loss = x.exp().mean()
                del x
            spoil(loss)
            loss.backward()
            results += [loss.detach(), *(weight.grad for weight in weights)]
        torch.cuda.synchronize()
        return results

    def spoil(like):
        """What reads a block after its end reads NaN."""
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
    assert {f"layers.{at}" for at in range(4)} <= {region for _, region in handle._scope._slots}
    check_moved(handle.stats())
    check_at_rest(handle.stats)


def test_context_around_compiled_blocks():
    model = make(Tower, GPU)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    steps = batches(3)

    def run(door):
        model.zero_grad()
        losses = []
        for batch in steps:
            with door:
                loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(grad.clone() for grad in gradients(model))]

    context = door(prefetch="8MiB")
    same(run, context)
    check_moved(context.stats())


# -- memory and time ---------------------------------------------------------------------------------------------------


def roomy():
    """Sizes as people leave them, in proportion to this model."""
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
    """An eighth of the bytes moves, the rest of the mask is free at once, and every value comes back."""
    context = door(window="1MiB", prefetch="4MiB")

    def run(door):
        torch.manual_seed(0)
        data = Data(GPU)
        x, w = data.leaf(512, 1000), data.leaf(1000, 1000)
        y = x * 1.0
        with door:
            for _ in range(6):
                mask = torch.rand_like(y) > 0.3
                y = torch.where(mask, y @ w, 0.0).masked_fill(mask.flip(0), 0.5).tanh()
                del mask
            loss = functional.dropout(y, 0.5).square().mean()
        return finish(loss, x, w)

    same(run, context)
    packed = context.stats().packed
    assert packed.count == 3 * 13  # two a layer, and the one of dropout
    assert packed.nbytes == 3 * 13 * 512_000


def test_packing_a_mask_takes_and_leaves_little_on_the_device():
    mask_bytes = 512 * MIB
    x = Data(GPU).leaf(1)
    context = door(window="1GiB", min_bytes="1MiB")
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
    context = door()
    x = Data(GPU).leaf(64, 64)
    mask = Data(GPU).tensor(64, 64) > 0
    for mode in ("default", "default", "error"):  # the first steps take memory of the host
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with context:
                loss = x.masked_fill(mask.clone(), 1.0).exp().masked_fill(mask.clone(), 2.0).sin().sum()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert context.stats().packed.count == 6


def test_a_kept_graph_does_not_collect_on_the_device():
    model = make(Tower, GPU)
    handle = offload(model, prefetch="4MiB")
    (batch,) = batches(1)
    model(batch).backward()  # the workspaces of backward's own thread come to stay
    model.zero_grad()
    loss = model(batch)
    torch.cuda.synchronize()
    away = torch.cuda.memory_allocated()
    for _ in range(2):
        loss.backward(retain_graph=True)
        model.zero_grad()
        torch.cuda.synchronize()
        # The prefetch window, and a parcel beyond it. All saves of this graph are ten times as much.
        assert torch.cuda.memory_allocated() - away <= 8 * MIB
    check_moved(handle.stats())


# -- the host far ahead of the device ----------------------------------------------------------------------------------


def test_figures_can_be_read_while_the_device_is_behind():
    """Events of compute may be pending when the lane's have passed: reading times must not ask for those."""
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(24)]).to(GPU)
    x = torch.randn(8192, 4096, device=GPU, requires_grad=True)
    context = door(min_bytes="1MiB", window="1GiB", prefetch="1GiB", host_limit="8GiB")
    for _ in range(4):
        with context:
            loss = model(x).sum()
        context.stats()
        loss.backward()
        context.stats()
    torch.cuda.synchronize()
    assert context.stats().stall_backward_s >= 0.0
    check_moved(context.stats())


def test_a_long_run_reads_its_times_on_the_way():
    """Far more waits than are kept unread."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(120)]).to(GPU)
    x = torch.randn(4096, 512, device=GPU, requires_grad=True)
    context = door(min_bytes=1, window="64MiB", prefetch="64MiB")
    for _ in range(12):
        with context:
            loss = model(x).sum()
        loss.backward()
    check_moved(context.stats())


@pytest.mark.parametrize("offset", [1, 3, 4])
def test_a_column_block_gives_the_same_gradient(offset):
    """Alignment chooses the kernel, and the kernel the order of a sum."""
    big = torch.randn(2048, 2048, device=GPU, dtype=torch.bfloat16, requires_grad=True)

    def run(context):
        weight = torch.ones(96, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        with context:
            loss = ((big * 1.5)[:, offset : offset + 96] @ weight).square().float().mean()
        loss.backward()
        return [weight.grad]

    plain = run(contextlib.nullcontext())
    context = door()
    for _ in range(2):
        assert_equal(run(context), plain)
    check_moved(context.stats())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_one_model_over_two_devices():
    """Each device has an engine, a pair of lanes and an autograd thread of its own."""
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
    context = door()
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
    """As PyTorch asks for before a capture: some steps on a stream beside. Ours learns, and takes its host memory."""
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


def arenas(door):
    """Host memory of the captures of a context or handle."""
    return [memory for captured in door._engines._captures.values() for memory in captured.store._memory]


@pytest.mark.parametrize(
    ("sizes", "happens"),
    [
        ({"window": 1, "prefetch": "8MiB"}, {EventKind.RELEASED, EventKind.FETCHED}),
        ({"window": 1, "prefetch": 1}, {EventKind.RELEASED, EventKind.MISSED}),
        ({"window": "6MiB", "prefetch": "4MiB"}, {EventKind.RELEASED}),
        ({"window": "16MiB", "prefetch": "16MiB", "min_bytes": "64KiB"}, {EventKind.RELEASED, EventKind.FETCHED}),
    ],
    ids=["as it comes", "nothing ahead", "some waits", "small ones too"],
)
@pytest.mark.parametrize("kind", ["context", "handle"])
def test_a_whole_step_in_one_graph(kind, sizes, happens):
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = contextlib.nullcontext()
    if kind == "context":
        context = watched = door(**sizes)
    else:
        watched = offload(model, **sizes)
    (batch,) = batches(1)
    warm_up(model, batch, context)
    seen = set()
    unsubscribe = watched.subscribe(lambda event: seen.add(event.what))
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


def test_a_region_that_draws_does_not_run_again_in_a_graph():
    model = make(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Dropout()) for _ in range(2))), GPU)
    offload(model, recipe="recompute")
    batch = torch.randn(512, 512, device=GPU)
    with pytest.raises(ebbtide.CaptureError, match="draws random numbers"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(batch).sum().backward()
    torch.cuda.synchronize()
    model(batch).sum().backward()  # outside of a graph it can


def test_replays_really_travel():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    context = door(prefetch="4MiB")
    recorded = Recorded(model, context)
    rooms = arenas(context)
    assert rooms
    for batch in batches(2):
        for room in rooms:
            room.fill_(0xFF)
        assert_equal(recorded(batch), plain_step(twin, batch))
        assert all(bool((room != 0xFF).any()) for room in rooms)


def test_eager_steps_and_replays_in_turns():
    model, eager = make(Tower, GPU), make(Tower, GPU, 1)
    twin, eager_twin = copy.deepcopy(model), copy.deepcopy(eager)
    context = door(prefetch="8MiB")
    recorded = Recorded(model, context)
    for batch in batches(4):
        recorded.batch.copy_(batch)
        eager.zero_grad()
        recorded.graph.replay()  # the device is far behind when the eager step takes its room
        loss = one_step(eager, batch, context)
        recorded.graph.replay()
        torch.cuda.synchronize()
        assert_equal([recorded.loss, *gradients(model)], plain_step(twin, batch))
        assert_equal([loss, *gradients(eager)], plain_step(eager_twin, batch))
    context.stats()


def test_two_graphs_replayed_in_turns():
    models = [make(Tower, GPU, seed) for seed in range(2)]
    twins = copy.deepcopy(models)
    context = door(prefetch="4MiB")
    recorded = [Recorded(model, context, rows=rows) for model, rows in zip(models, (8, 4), strict=True)]
    rooms = arenas(context)
    ranges = sorted((room.data_ptr(), room.data_ptr() + room.numel()) for room in rooms)
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
    recorded = Recorded(model, door(prefetch="4MiB"), two_micro_batches)
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
    context = door(prefetch="8MiB")
    recorded = Recorded(model, context, forked)
    for batch in batches(3):
        assert_equal(recorded(batch), plain_step(twin, batch))


def test_a_graph_that_is_kept_beyond_its_capture():
    """All lanes are joined, or the capture could not end; and what was saved in it cannot be had outside."""
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
    context = door(prefetch="4MiB")
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
    context = door()
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
    context, roomy_context = door(prefetch="8MiB"), door(window="1GiB")
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
            older = other(batch)  # all of it sent, none released: its end has copies to wait for
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
    context = door(**roomy())
    ours = pool_bytes(model, context)
    assert ours < 0.7 * plain
    check_moved(context.stats())


def test_without_a_step_before_all_of_a_capture_stays():
    model = make(Tower, GPU)
    twin = copy.deepcopy(model)
    (batch,) = batches(1)
    warm_up(model, batch, contextlib.nullcontext())
    context = door()
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
    """Blocks that can be graphed one by one, and something eager after each that saves."""

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
    context = door(prefetch="8MiB")
    for batch in batches(4):
        batch.requires_grad_()
        model.zero_grad(set_to_none=True)
        loss = one_step(model, batch, context)
        torch.cuda.synchronize()
        assert_equal([loss, *gradients(model)], plain_step(twin, batch))
    check_moved(context.stats())


def test_context_around_the_making_of_graphed_callables():
    """Forward and backward are captured apart there: nothing may move."""
    model = make(Waves, GPU)
    twin = copy.deepcopy(model)
    context = door(prefetch="8MiB")
    with context:
        graphed_layers(model)
    assert context.stats().kept[Reason.CAPTURING].count > 0
    for batch in batches(3):
        batch.requires_grad_()
        model.zero_grad(set_to_none=True)
        loss = one_step(model, batch, contextlib.nullcontext())
        torch.cuda.synchronize()
        assert_equal([loss, *gradients(model)], plain_step(twin, batch))
