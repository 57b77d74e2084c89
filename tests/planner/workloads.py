"""Profiles for tests: small ones, and two like the workloads of docs/measured.md."""

import dataclasses

from ebbtide._profiling.profile import ExpensiveOp, Link, Outside, PostRegionPoint, Profile, RegionProfile, SavedTensor

GIB = 1024**3
MIB = 1024**2
MS = 1e-3

LINK = Link(out=55e9, back=55e9, latency_s=20e-6, interference=0.013)


def region(name="layers.0", **changes):
    """10 ms and three saved tensors of 100 MB; recomputed from an input of 20 MB, with two expensive calls."""
    values = {
        "forward_s": 10 * MS,
        "backward_s": 20 * MS,
        "recompute_s": 10 * MS,
        "saved_tensors": (
            SavedTensor(0, 100_000_000, 0.0),
            SavedTensor(1, 100_000_000, 5 * MS),
            SavedTensor(2, 100_000_000, 10 * MS),
        ),
        "not_movable_bytes": 0,
        "inputs": (SavedTensor(0, 20_000_000, 0.0),),
        "expensive_ops": (
            ExpensiveOp(0, 50_000_000, 4 * MS, 4 * MS, "aten::mm"),
            ExpensiveOp(1, 100_000_000, 8 * MS, 3 * MS, "aten::mm"),
        ),
        "forward_work_bytes": 100_000_000,
        "backward_work_bytes": 400_000_000,
        "grad_bytes": 0,
    }
    return RegionProfile(name=name, **{**values, **changes})


def outside(**changes):
    values = {
        "before_s": 0.0,
        "after_s": 0.0,
        "backward_before_s": 0.0,
        "backward_after_s": 0.0,
        "kept_bytes": 0,
    }
    peak_bytes, index = changes.pop("peak_bytes", 0), changes.pop("tensor_index", 3)
    values = {**values, **changes}
    return Outside(**{"post_region_points": at_the_end(values["after_s"], peak_bytes, index), **values})


def at_the_end(after_s, peak_bytes, index):
    """One place after the last region: a saved tensor at the end of forward."""
    return (PostRegionPoint(index, after_s, peak_bytes),)


def profile(*regions, outside=outside(), link=None, base_bytes=1_000_000_000, **changes):  # noqa: B008
    """A link of 10 GB/s without latency or interference, by default."""
    values = {
        "made_for": {"model": "small", "device": "none"},
        "base": {"parameters": base_bytes},
        "host_limit_bytes": None,
        "tokens": 1000,
    }
    link = link or Link(1e10, 1e10, latency_s=0.0, interference=0.0)
    return Profile(regions=tuple(regions), outside=outside, link=link, base_bytes=base_bytes, **{**values, **changes})


def layers(count, **changes):
    """`count` equal regions."""
    return tuple(region(f"layers.{k}", **changes) for k in range(count))


def workload_a(count=16):
    """Llama 1B shapes, 4 x 4096 tokens, on one H200."""
    block = _block(
        forward_s=5.0 * MS,
        backward_s=10.2 * MS,
        recompute_s=4.7 * MS,
        saved=[64, 64, 128, 64, 16, 16, 64, 16, 64, 64, 128, 64, 256, 256, 256, 256],
        input_mib=64,
        ops=[(64, 0.2), (16, 0.06), (16, 0.06), (66, 0.55), (64, 0.2), (256, 0.8), (256, 0.8)],
        forward_work_bytes=600 * MIB,
        backward_work_bytes=3 * GIB,
    )
    outside = Outside(
        before_s=0.5 * MS,
        after_s=12.1 * MS,
        backward_before_s=24.7 * MS,
        backward_after_s=0.5 * MS,
        kept_bytes=int(1.5 * GIB),
        post_region_points=at_the_end(12.1 * MS, 5 * GIB, index=20),
    )
    return _llama("a", block, count, outside, 16384)


def workload_b(count=16):
    """Llama 8B shapes, 1 x 32768 tokens, on one H200."""
    block = _block(
        forward_s=43.5 * MS,
        backward_s=100 * MS,
        recompute_s=40 * MS,
        saved=[256, 512, 256, 256, 64, 64, 256, 64, 260, 256, 512, 256, 896, 896, 896, 896],
        input_mib=256,
        ops=[(256, 1.7), (64, 0.4), (64, 0.4), (260, 17.0), (256, 1.7), (896, 6.7), (896, 6.7)],
        forward_work_bytes=5 * GIB,
        backward_work_bytes=10 * GIB,
    )
    outside = Outside(
        before_s=1 * MS,
        after_s=20 * MS,
        backward_before_s=45 * MS,
        backward_after_s=2 * MS,
        kept_bytes=int(2.3 * GIB),
        post_region_points=at_the_end(20 * MS, int(12.2 * GIB), index=20),
    )
    return _llama("b", block, count, outside, 32768)


_OPS = ("mm", "mm", "mm", "attention", "mm", "mm", "mm")  # q, k, v, attention, o, gate, up


def _block(*, forward_s, saved, input_mib, ops, **measured):
    """A layer: `saved` in MiB, spread over forward; `ops` in (MiB, milliseconds) of expensive calls."""
    return RegionProfile(
        name="",
        forward_s=forward_s,
        saved_tensors=tuple(SavedTensor(k, size * MIB, forward_s * k / len(saved)) for k, size in enumerate(saved)),
        not_movable_bytes=0,
        inputs=(SavedTensor(0, input_mib * MIB, 0.0),),
        expensive_ops=tuple(
            ExpensiveOp(k, size * MIB, forward_s * (k + 1) / (len(ops) + 1), ms * MS, f"aten::{op}")
            for k, (op, (size, ms)) in enumerate(zip(_OPS, ops, strict=True))
        ),
        grad_bytes=0,
        **measured,
    )


def _llama(name, block, count, outside, tokens):
    return Profile(
        made_for={"model": name, "device": "H200"},
        regions=tuple(dataclasses.replace(block, name=f"model.layers.{k}") for k in range(count)),
        outside=outside,
        link=LINK,
        base_bytes=6 * GIB,
        base={"parameters": 3 * GIB, "gradients": 3 * GIB},
        host_limit_bytes=None,
        tokens=tokens,
    )
