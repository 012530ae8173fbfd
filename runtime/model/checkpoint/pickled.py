"""The tensors of a file that torch.save wrote."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from rootlace.wire.errors import UnsupportedModel


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """By their names, memory-mapped; nothing but tensors is made of what the file says. Raises
    `UnsupportedModel`."""
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UnsupportedModel(f"{file}: the file is missing") from None
    except pickle.UnpicklingError as error:  # torch's message tells how to let the file run code
        raise UnsupportedModel(f"{file}: damaged, or it has more than tensors") from error
    except Exception as error:  # whatever else a damaged file leads to
        why = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{file}: it cannot be read: {why}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file}: not a dictionary of tensors")
    for name, tensor in found.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not dense:
            raise UnsupportedModel(f"{file}: {name!s:.99} is not a dense tensor")
    return {name: tensor.detach() for name, tensor in found.items()}
