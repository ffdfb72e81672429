"""Tiny data sets in the place of those that the scripts download: the same files, made up."""

import json
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


def words_and_tokenizer(folder: Path) -> None:
    """A text of words, and a tokenizer that knows them, in the files of the library tokenizers."""
    (folder / "train.txt").write_text(text(3000))
    vocabulary = {word: code for code, word in enumerate(("[UNK]", *WORDS))}
    description = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32, "unk_token": "[UNK]"}
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name, content in (("tokenizer.json", description), ("tokenizer_config.json", settings)):
        (folder / "tokenizer" / name).write_text(json.dumps(content))


def fineweb(folder: Path) -> None:
    """What dion's data scripts download, 256 numbers of a header and uint16 tokens, and settings for a tiny model."""
    tokens = np.array([letter for letter in text(2000).encode()][:8000], dtype=np.uint16)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    (folder / "data").mkdir(exist_ok=True)
    for part in ("train", "val"):
        (folder / "data" / f"fineweb_{part}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    settings = {
        "data_dir": "data",
        "batch_size": 8,
        "device_batch_size": 2,
        "sequence_length": 32,
        "num_iterations": 8,
        "model_dim": 32,
        "n_layer": 2,
        "n_head": 2,
        "val_loss_every": 0,
        "val_tokens": 128,
    }
    (folder / "tiny.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))


def image_folders(folder: Path) -> None:
    """Pictures of two kinds in two parts, in a folder for each: 16 dark and 16 light ones to train on."""
    from PIL import Image  # of the scripts that take pictures

    noise = np.random.default_rng(0)
    for part, count in (("train", 16), ("validation", 4)):
        for kind, lowest in (("dark", 0), ("light", 128)):
            place = folder / "data" / part / kind
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = noise.integers(lowest, lowest + 128, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
