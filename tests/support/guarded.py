"""Memory whose end is a page that nobody may touch: who reads or writes one byte beyond it dies at once."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


@contextmanager
def guarded(nbytes: int) -> Iterator[Tensor]:
    """A tensor (nbytes) of uint8 that ends where a page with no rights begins; not to be used afterwards.

    Raises:
        OSError: The page's rights cannot be changed.
    """
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    with mmap.mmap(-1, size + page) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        guard = ctypes.c_void_p(whole.data_ptr() + size)
        for rights in (_PROT_NONE, mmap.PROT_READ | mmap.PROT_WRITE):
            if _LIBC.mprotect(guard, ctypes.c_size_t(page), rights):
                raise OSError(ctypes.get_errno(), "mprotect")
            if rights == _PROT_NONE:
                yield whole[size - nbytes : size]
        del whole
