"""xformers' attention with a kernel of the test, because xformers' own kernels need CUDA.

`make test-trainers` installs xformers.
"""

import pytest
import torch
from cases import gradients, make
from support import assert_equal
from torch import nn

import ebbtide
from ebbtide import Recipe

fmha = pytest.importorskip("xformers.ops.fmha", reason="make test-trainers installs it", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

WIDTH, HEADS, TOKENS, BLOCKS = 32, 4, 24, 3
MOVES = {"store": "mock", "min_bytes": 1}
LITTLE = {"window": "1KiB"}  # a small window in comparison, as on a large model
CALLS = []


@torch.library.custom_op("xformers_on_the_cpu::attention_forward", mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For inputs of shape [batch, tokens, heads, head_dim]: the output, and the logarithms of the sums."""
    CALLS.append(None)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).contiguous(), scores.logsumexp(-1)


class OnTheCpu:
    OPERATOR = attention_forward
    SUPPORTED_DEVICES = frozenset(("cpu",))
    SUPPORTED_DTYPES = frozenset((torch.float32,))
    SUPPORTED_MAX_K = 256
    SUPPORTS_DROPOUT = False
    NAME = "on the CPU"


class Forward(OnTheCpu, fmha.AttentionFwOpBase):
    @classmethod
    def apply(cls, inp, needs_gradient):
        out, sums = attention_forward(inp.query, inp.key, inp.value)
        return out, fmha.Context(lse=sums, out=out)


class Backward(OnTheCpu, fmha.AttentionBwOpBase):
    @classmethod
    def apply(cls, ctx, inp, grad):
        scale = inp.query.shape[-1] ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", inp.query, inp.key) * scale
        weights = (scores - ctx.lse[..., None]).exp()
        grad_weights = torch.einsum("bqhd,bkhd->bhqk", grad, inp.value)
        less = (grad * ctx.out).sum(-1).transpose(1, 2)[..., None]
        grad_scores = weights * (grad_weights - less) * scale
        return fmha.Gradients(
            dq=torch.einsum("bhqk,bkhd->bqhd", grad_scores, inp.key),
            dk=torch.einsum("bhqk,bqhd->bkhd", grad_scores, inp.query),
            dv=torch.einsum("bhqk,bqhd->bkhd", weights, grad),
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, TOKENS, 3, HEADS, WIDTH // HEADS).unbind(2)
        attended = fmha.memory_efficient_attention(q, k, v, op=(Forward, Backward))
        return x + self.out(attended.reshape(1, TOKENS, WIDTH))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(model, seed):
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    model.zero_grad()
    CALLS.clear()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *gradients(model, x)]


def test_the_kernel_gives_torchs_gradients():
    """Checks xformers' function with the kernel of the test, which later tests compare with itself."""
    given = [torch.randn(1, TOKENS, HEADS, 8, dtype=torch.float32, requires_grad=True) for _ in range(3)]
    found = torch.autograd.grad(fmha.memory_efficient_attention(*given, op=(Forward, Backward)).sin().sum(), given)
    plain = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in given)).transpose(1, 2)
    for mine, expected in zip(found, torch.autograd.grad(plain.sin().sum(), given), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({**LITTLE, "mode": "all"}, 1),
        ({**LITTLE, "recipe": "recompute"}, 2),
        ({**LITTLE, "recipe": "selective"}, 1),
        ({**LITTLE, "recipe": Recipe("selective", ops=("attention",))}, 1),
        ({**LITTLE, "recipe": Recipe("selective", ops=("matmul",))}, 2),
        ({"budget": "1GiB"}, None),
    ],
    ids=["everything", "recompute", "selective", "its attention", "other operators", "budget"],
)
def test_its_attention_computes_the_same_and_moves(settings, calls):
    """`calls`: of the kernel for each block in a step; a saved expensive output is not recomputed."""
    model, twin = make(Net, torch.device("cpu")), make(Net, torch.device("cpu"))
    handle = ebbtide.offload(model, **MOVES, **settings)
    for seed in range(6):
        ours = step(model, seed)
        if calls is not None:
            assert len(CALLS) == calls * BLOCKS
        assert_equal(ours, step(twin, seed))
    if calls is not None:
        assert handle.stats().out.nbytes > 0
