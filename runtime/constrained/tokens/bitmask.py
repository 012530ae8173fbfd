"""Packed masks: int32 words, bit i of word w is token 32w + i."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any

import numpy as np


def words_of(vocab_size: int) -> int:
    """How many words a mask over the vocabulary has."""
    return -(-vocab_size // 32)


def writable(out: Any, vocab_size: int) -> np.ndarray:
    """`out`, a mask for a caller to read, as the array to write to; a torch tensor on the CPU as
    the array that shares its memory.

    Raises TypeError where it is neither, ValueError where it is not a contiguous, writable int32
    array of as many words as the vocabulary needs: some machines write to its address.
    """
    if not isinstance(out, np.ndarray):
        view = getattr(out, "numpy", None)
        if view is None:
            raise TypeError(f"a bit mask is a NumPy array of int32, not {type(out).__name__}")
        out = view()
    words = words_of(vocab_size)
    if out.dtype != np.int32 or out.shape != (words,):
        raise ValueError(
            f"a bit mask over {vocab_size} tokens is int32 [{words}], not {out.dtype} "
            f"{list(out.shape)}"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("a bit mask must be contiguous and writable")
    return out


def address(words: np.ndarray) -> int:
    """Where a packed mask that may be written to stands in memory; a fifth of the time that
    `words.ctypes.data` takes."""
    return addressof(c_char.from_buffer(words.data))


def allows(words: np.ndarray, token: int) -> bool:
    """Whether a packed mask allows a token of the vocabulary."""
    return bool(words.item(token >> 5) >> (token & 31) & 1)


def packed(bits: np.ndarray) -> np.ndarray:
    """int32 words of `bits`: bool, a multiple of 32 of them."""
    words: np.ndarray = np.packbits(bits, bitorder="little").view(np.int32)
    return words


def filled(fill: Callable[[np.ndarray], None], vocab_size: int) -> np.ndarray:
    """bool [vocab_size] of the packed mask that `fill` writes."""
    words = np.zeros(words_of(vocab_size), np.int32)
    fill(words)
    return unpacked(words, vocab_size)


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [vocab_size] of a packed mask."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)
