"""Fashion-MNIST from Debian's package `dataset-fashion-mnist`, unpacked into a cache folder without root."""

import gzip
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch

CACHE = Path("~/.cache/gradwire/fashion-mnist").expanduser()
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""Where the package's files lie, below the folder it was unpacked into or below the root of the file system."""
PACKAGE = "dataset-fashion-mnist"


def data_folder(cache: Path = CACHE) -> Path:
    """Returns the folder of the four IDX files; fetches and unpacks the package where it is not there yet.

    Args:
        cache: Where to unpack it to.

    Raises:
        RuntimeError: There is no apt here, or it cannot fetch the package; the message says what to do instead.
    """
    unpacked = cache / INSTALLED.relative_to("/")
    for folder in (INSTALLED, unpacked):
        if folder.is_dir():
            return folder
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(
                f"Fashion-MNIST is not here and `{tool}` is missing: put the four .gz files of Zalando "
                f"Research's fashion-mnist into {unpacked}, or run where Debian's packages are"
            )
    cache.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", PACKAGE], cache)
    package = next(cache.glob(f"{PACKAGE}_*.deb"))
    _run(["dpkg-deb", "-x", package.name, "."], cache)
    package.unlink()
    return unpacked


def _run(command: list[str], folder: Path) -> None:
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {ended.stderr.strip()[-400:]}; refresh the lists with "
            "`apt-get update`, or install the package"
        )


def read_idx(file: Path) -> torch.Tensor:
    """Returns the tensor of a gzipped IDX file of bytes: uint8.

    Raises:
        ValueError: The file is none.

    Source: LeCun, Cortes, Burges, The MNIST database, section "File formats": two zero bytes, the type (8: unsigned
        byte), the number of dimensions, each length as a big-endian 32-bit integer, the data.
    """
    raw = gzip.decompress(file.read_bytes())
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"`file` {file} is no IDX file of bytes: it begins with {raw[:3]!r}")
    header = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    return torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8, offset=header)).view(shape)


def load_images(part: str, folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (images, labels) of Fashion-MNIST: float32 (n, 1, 28, 28) around zero, int64 (n).

    Args:
        part: `train` (60,000) or `t10k` (10,000).
        folder: Of the files; fetched by default.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    folder = folder or data_folder()
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz").float().div_(255.0)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long()
    # Mean and deviation of the training pixels, so that both parts are scaled alike.
    return images.sub_(0.286).div_(0.353).unsqueeze(1), labels
