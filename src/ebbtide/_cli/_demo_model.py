"""What the demo trains: a byte-level transformer, on the source text of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide._cli._demo_task import Size
from ebbtide._errors import EbbtideError

_BYTES = 256
_MLP_FACTOR = 4
_TEXT_BYTES = 4_000_000


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """Pre-norm: each half reads a normalised stream and adds to the raw one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, _MLP_FACTOR * width), nn.GELU(), nn.Linear(_MLP_FACTOR * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class ByteTransformer(nn.Module):
    """Bytes in, for each the logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _BYTES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of every next byte in `batch`, whose rows are one byte longer than the context."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Text:
    """Batches from the *.py files of the standard library: real text that is on every machine with Python."""

    def __init__(self, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(_read_standard_library()), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, context: int) -> Tensor:
        """Pieces from random places, of shape (rows, context + 1)."""
        starts = torch.randint(len(self._bytes) - context, (rows, 1), generator=self._random)
        return self._bytes[starts + torch.arange(context + 1)].long()


def _read_standard_library() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_TEXT_BYTES]
    if not text:
        raise EbbtideError(f"the demo reads the source files of Python's standard library: {str(folder)!r} has none")
    return text
