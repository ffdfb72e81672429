"""A byte-level transformer in plain torch: about 0.5 M parameters, small enough for two cores."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


class TransformerBlock(nn.Module):
    """Pre-norm attention and a two-layer perceptron, each added to its input.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3.
    """

    def __init__(self, width: int, heads: int) -> None:
        """Makes the layers.

        Args:
            width: Features per position; a multiple of `heads`.
            heads: Number of attention heads.
        """
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context, width) to the same shape; a position attends to itself and those before it."""
        batch, context, width = x.shape
        packed = self.query_key_value(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, context, width))
        hidden: torch.Tensor = self.perceptron_out(functional.gelu(self.perceptron_in(self.perceptron_norm(x))))
        return x + hidden


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, *, context: int = 128, width: int = 128, layers: int = 2, heads: int = 4, seed: int = 0) -> None:
        """Makes the model, the same one for the same seed on every rank.

        Args:
            context: Longest sequence, in bytes.
            width: Features per position; a multiple of `heads`.
            layers: Number of blocks.
            heads: Number of attention heads of each block.
            seed: Seed of the initial weights; torch's global generator is not changed.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bytes = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Parameter(0.02 * torch.randn(context, width))
            self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.logits = nn.Linear(width, VOCABULARY, bias=False)
            nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps bytes (batch, context), int64, to logits (batch, context, 256)."""
        x = self.bytes(inputs) + self.positions[: inputs.shape[1]]
        logits: torch.Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


def loss_in_nats(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy per byte, in nats.

    Args:
        model: A ByteTransformer, wrapped in DDP or not.
        inputs: Bytes, shape (batch, context), int64.
        targets: Bytes that follow those of `inputs`, of the same shape and dtype.
    """
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
