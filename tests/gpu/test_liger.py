"""Llama with kernels of Liger, which overwrite their arguments: training equals the plain run bit for bit."""

import pytest
import torch

import ebbtide

if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)
liger = pytest.importorskip("liger_kernel.transformers", reason="pip install liger-kernel", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default", "error::ebbtide.EbbtideWarning"),  # triton and transformers warn too
]

MOVES = {"store": "host", "host_limit": "4GiB", "min_bytes": 1}


def train(settings, **kernels):
    """Return losses, gradients and weights of six steps of two micro-batches, and stats."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=1000,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    liger.apply_liger_kernel_to_llama(model=model, **kernels)
    handle = None if settings is None else ebbtide.offload(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for _ in range(6):
        for _ in range(2):
            tokens = torch.randint(1000, (4, 64), device="cuda")
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            results.append(loss.detach().clone())
        results += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    results += [p.detach().clone() for p in model.parameters()]
    stats = None
    if handle is not None:
        stats = handle.stats()
        handle.remove()
    return results, stats


@pytest.mark.parametrize(
    "settings",
    [
        {**MOVES, "mode": "all", "window": 1},
        {**MOVES, "mode": "all", "window": "1GiB"},
        {**MOVES, "recipe": "selective"},
        {**MOVES, "recipe": "recompute"},
        {**MOVES, "budget": "8GiB"},
        MOVES,
    ],
    ids=["everything", "all in the window", "selective", "recompute", "budget", "auto"],
)
@pytest.mark.parametrize("is_loss_linear", [True, False])
def test_training_with_kernels_of_liger_equals_the_plain_run(settings, is_loss_linear):
    kernels = {"fused_linear_cross_entropy": is_loss_linear, "cross_entropy": not is_loss_linear}
    plain, _ = train(None, **kernels)
    again, _ = train(None, **kernels)
    assert all(map(torch.equal, again, plain))  # else a comparison proves nothing
    ours, stats = train(settings, **kernels)
    assert [at for at, (a, b) in enumerate(zip(ours, plain, strict=True)) if not torch.equal(a, b)] == []
    if settings.get("window") == 1:
        assert stats.out.nbytes > 0
