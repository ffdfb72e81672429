"""A task whose gradients are rare and skewed: a language model of words, with a large embedding and a large classifier.

A word of a vocabulary of thousands is in few batches: its row of the embedding has no gradient in most steps, and its
row of the classifier nothing but a small one that all words get. Adam divides by what such a row has had so far.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from gradwire.bench.studies.convergence.tasks import SEED_STRIDE, BatchedTask, TaskFacts
from gradwire.bench.train.text import library_text, split_text

WORD = re.compile(rb"\w+|[^\w\s]")
VOCABULARY = 4096
"""Number of words that the model knows; the first one stands for all rarer words."""
WIDTH, HIDDEN, CONTEXT = 32, 64, 8
WORDS_SIZE = "0.3M"


class WordModel(nn.Module):
    """Predicts the next word from the eight before it: 284,832 parameters, 262,144 of them rows of words.

    Args:
        seed: Seed of the random weights.

    Source: Bengio et al., A neural probabilistic language model, JMLR 2003.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.inside = nn.Sequential(
                nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
            )
            self.classifier = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Returns float32 logits of shape (n, 4096) for the numbers of words, int64 of shape (n, 8)."""
        logits: Tensor = self.classifier(self.inside(self.embedding(words).flatten(1)))
        return logits


@dataclass
class WordsTask(BatchedTask):
    """Trains the model of words under Adam; the quality is bits a word of held-out text.

    Attributes:
        batch: Number of places in the text of a rank and step.
        validation_places: Number of places of the held-out text that each rank scores.
        facts: Description of the task.
    """

    batch: int = 32
    validation_places: int = 1024
    facts: TaskFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = TaskFacts(
            name="words",
            title="model of 4,096 words and 0.3 M parameters on the standard library's source, Adam",
            quality="bits a word of held-out text",
            higher_is_better=False,
            tolerance=0.06,
            steps=300,
            optimizer="adam",
        )

    def load(self) -> None:
        """Reads the text as numbers of words, so that forked ranks share it."""
        _ = self._numbers

    def model(self, seed: int) -> nn.Module:
        """Returns a new model of words, the same on every rank for the same seed."""
        return WordModel(seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns Adam."""
        return Adam(parameters, lr=3e-3)

    def batch_of(self, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a rank's batch of a step: (eight words, the word that follows), a row for each sample."""
        return _places(self._numbers[0], step + SEED_STRIDE * seed, rank, self.batch)

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of a batch: a scalar tensor with a graph."""
        return functional.cross_entropy(model(inputs), targets)

    def score(self, model: nn.Module, rank: int) -> Tensor:
        """Returns (sum of the losses in bits, number of words) on held-out text, float64."""
        inputs, targets = _places(self._numbers[1], 0, rank, self.validation_places)
        bits = functional.cross_entropy(model(inputs), targets, reduction="sum").item() / math.log(2)
        return torch.tensor([bits, len(targets)], dtype=torch.float64)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Training and held-out text as numbers of words: int64, in the order of the text; 0 for an unknown word."""
        training, held_out = (WORD.findall(part.numpy().tobytes()) for part in split_text(library_text()))
        known = sorted(Counter(training).items(), key=lambda item: (-item[1], item[0]))[: VOCABULARY - 1]
        numbers = {word: number for number, (word, _) in enumerate(known, 1)}
        first, second = (torch.tensor([numbers.get(word, 0) for word in part]) for part in (training, held_out))
        return first, second


def _places(numbers: Tensor, step: int, rank: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(numbers) - CONTEXT, (batch, 1), generator=generator)
    windows = numbers[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]
