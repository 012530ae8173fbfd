"""Conversion of NumPy's arrays to torch's tensors and back, over the same memory.

The native kernels take NumPy's arrays, so that an engine can run without torch. ml_dtypes has the
floats that NumPy lacks.
"""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Integer dtypes by size in bytes, for floats that one of the libraries lacks."""


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype of the same name; of ml_dtypes if NumPy lacks the dtype."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the array as a tensor. Raises ValueError for an array that is not contiguous. The
    tensor of a read-only array must not be written to."""
    if not array.flags.c_contiguous:
        raise ValueError("an array that is not contiguous has no tensor over the same memory")
    dtype = torch_dtype(array.dtype)
    if not array.size:  # a buffer must not be empty
        return torch.empty(array.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch cannot mark a tensor as read-only, and says so.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(array.reshape(-1).view(np.uint8), dtype=dtype).view(array.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor as a contiguous array (a copy if it is not contiguous)."""
    tensor = tensor.detach().contiguous()
    dtype = numpy_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    found: np.ndarray = tensor.view(_INTEGERS[tensor.itemsize]).numpy().view(dtype)
    return found
