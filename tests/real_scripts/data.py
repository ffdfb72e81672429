"""Tiny data sets in the place of those that the scripts download: the same files, made up."""

import pickle
import random
from pathlib import Path

import numpy as np

WORDS = ("the", "wire", "is", "slow", "and", "gradients", "are", "many", "so", "send", "less", "of", "them", ".")


def text(words: int, seed: int = 0) -> str:
    """Words in an order that a model can learn a little of, ten a line."""
    chosen, place = random.Random(seed), 0
    lines = []
    for _ in range(words // 10):
        line = []
        for _ in range(10):
            place = (place + chosen.choice((1, 1, 1, 5))) % len(WORDS)
            line.append(WORDS[place])
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def nanogpt_characters(folder: Path) -> None:
    """What nanoGPT's data/shakespeare_char/prepare.py makes: uint16 tokens, and the alphabet."""
    written = text(5000)
    alphabet = sorted(set(written))
    codes = {letter: code for code, letter in enumerate(alphabet)}
    tokens = np.array([codes[letter] for letter in written], dtype=np.uint16)
    place = folder / "data" / "shakespeare_char"
    place.mkdir(parents=True, exist_ok=True)
    tokens[:20000].tofile(place / "train.bin")
    tokens[20000:].tofile(place / "val.bin")
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": codes}
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))


def mingpt_text(folder: Path) -> None:
    """A text for a model of characters."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "input.txt").write_text(text(400))


def wikitext(folder: Path) -> None:
    """What Lightning's WikiText2 downloads: 4,200 blocks of 35 words, as its examples set 4,000 aside."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "wikitext-2.txt").write_text(text(4200 * 32))
