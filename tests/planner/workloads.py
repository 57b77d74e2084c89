"""Profiles for tests: small ones made of numbers, and two that are like the workloads of MEASURED.md."""

import dataclasses

from ebbtide._profiling.profile import Around, Dear, Link, Profile, RegionProfile, Save, Turn

GIB = 1024**3
MIB = 1024**2
MS = 1e-3

LINK = Link(out=55e9, back=55e9, out_duplex=50.5e9, back_duplex=50.5e9, latency_s=20e-6)


def region(name="layers.0", **changes):
    """10 ms and three saves of 100 MB; run again from an input of 20 MB, with two dear outputs."""
    given = {
        "forward_s": 10 * MS,
        "backward_s": 20 * MS,
        "again_s": 10 * MS,
        "saves": (Save(0, 100_000_000, 0.0), Save(1, 100_000_000, 5 * MS), Save(2, 100_000_000, 10 * MS)),
        "stuck_bytes": 0,
        "inputs": (Save(0, 20_000_000, 0.0),),
        "dear": (Dear(0, 50_000_000, 4 * MS, 4 * MS, "aten::mm"), Dear(1, 100_000_000, 8 * MS, 3 * MS, "aten::mm")),
        "forward_work_bytes": 100_000_000,
        "backward_work_bytes": 400_000_000,
        "grad_bytes": 0,
    }
    return RegionProfile(name=name, **{**given, **changes})


def around(**changes):
    given = {
        "before_s": 0.0,
        "after_s": 0.0,
        "turn_s": 0.0,
        "end_s": 0.0,
        "kept_bytes": 0,
    }
    peak_bytes, save = changes.pop("peak_bytes", 0), changes.pop("save", 3)
    given = {**given, **changes}
    return Around(**{"turns": at_the_end(given["after_s"], peak_bytes, save), **given})


def at_the_end(after_s, peak_bytes, save):
    """One place behind the last region: the save at the end of forward."""
    return (Turn(save, after_s, peak_bytes),)


def profile(*regions, around=around(), link=None, base_bytes=1_000_000_000, **changes):  # noqa: B008
    """A link of 10 GB/s without latency or interference, unless another is given."""
    given = {
        "made_for": {"model": "small", "device": "none"},
        "base": {"parameters": base_bytes},
        "host_limit_bytes": None,
        "tokens": 1000,
    }
    link = link or Link(1e10, 1e10, 1e10, 1e10, latency_s=0.0, interference=0.0)
    return Profile(regions=tuple(regions), around=around, link=link, base_bytes=base_bytes, **{**given, **changes})


def layers(count, **changes):
    """`count` equal regions."""
    return tuple(region(f"layers.{k}", **changes) for k in range(count))


def workload_a(count=16):
    """Llama 1B shapes, 4 x 4096 tokens, on one H200."""
    block = _block(
        forward_s=5.0 * MS,
        backward_s=10.2 * MS,
        again_s=4.7 * MS,
        saved=[64, 64, 128, 64, 16, 16, 64, 16, 64, 64, 128, 64, 256, 256, 256, 256],
        input_mib=64,
        dear=[(64, 0.2), (16, 0.06), (16, 0.06), (66, 0.55), (64, 0.2), (256, 0.8), (256, 0.8)],
        forward_work_bytes=600 * MIB,
        backward_work_bytes=3 * GIB,
    )
    outside = Around(
        before_s=0.5 * MS,
        after_s=12.1 * MS,
        turn_s=24.7 * MS,
        end_s=0.5 * MS,
        kept_bytes=int(1.5 * GIB),
        turns=at_the_end(12.1 * MS, 5 * GIB, save=20),
    )
    return _llama("a", block, count, outside, 16384)


def workload_b(count=16):
    """Llama 8B shapes, 1 x 32768 tokens, on one H200."""
    block = _block(
        forward_s=43.5 * MS,
        backward_s=100 * MS,
        again_s=40 * MS,
        saved=[256, 512, 256, 256, 64, 64, 256, 64, 260, 256, 512, 256, 896, 896, 896, 896],
        input_mib=256,
        dear=[(256, 1.7), (64, 0.4), (64, 0.4), (260, 17.0), (256, 1.7), (896, 6.7), (896, 6.7)],
        forward_work_bytes=5 * GIB,
        backward_work_bytes=10 * GIB,
    )
    outside = Around(
        before_s=1 * MS,
        after_s=20 * MS,
        turn_s=45 * MS,
        end_s=2 * MS,
        kept_bytes=int(2.3 * GIB),
        turns=at_the_end(20 * MS, int(12.2 * GIB), save=20),
    )
    return _llama("b", block, count, outside, 32768)


_DEAR = ("mm", "mm", "mm", "attention", "mm", "mm", "mm")  # q, k, v, attention, o, gate, up


def _block(*, forward_s, saved, input_mib, dear, **measured):
    """A layer: MiB of what it saves, spread over its forward, and (MiB, milliseconds) of its dear outputs."""
    return RegionProfile(
        name="",
        forward_s=forward_s,
        saves=tuple(Save(k, size * MIB, forward_s * k / len(saved)) for k, size in enumerate(saved)),
        stuck_bytes=0,
        inputs=(Save(0, input_mib * MIB, 0.0),),
        dear=tuple(
            Dear(k, size * MIB, forward_s * (k + 1) / (len(dear) + 1), ms * MS, f"aten::{op}")
            for k, (op, (size, ms)) in enumerate(zip(_DEAR, dear, strict=True))
        ),
        grad_bytes=0,
        **measured,
    )


def _llama(name, block, count, outside, tokens):
    return Profile(
        made_for={"model": name, "device": "H200"},
        regions=tuple(dataclasses.replace(block, name=f"model.layers.{k}") for k in range(count)),
        around=outside,
        link=LINK,
        base_bytes=6 * GIB,
        base={"parameters": 3 * GIB, "gradients": 3 * GIB},
        host_limit_bytes=None,
        tokens=tokens,
    )
