"""Take the blocks of a GGUF file's weights apart into codes, scales and offsets.

    block of Q4_1, 20 bytes:  scale f16 | offset f16 | 16 bytes, two codes of 4 bits in each
    number = code * scale + offset

Codes, scales and offsets are the file's. Their numbers equal the results of the `gguf` package's
`dequantize`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import msgspec
import numpy as np

from rootlace.kernels.codes import TABLES, Codes

RawBlocks = np.ndarray
"""Bytes of blocks, uint8 [rows, blocks of a row, bytes of a block]."""


class BlockCodes(msgspec.Struct, frozen=True):
    """Parts of a `kernels.weights.Quantised`; `group` inputs share a scale."""

    codes: Codes
    group: int
    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    units: np.ndarray | None = None
    offset_units: np.ndarray | None = None

    def numbers(self) -> np.ndarray:
        """Return the dequantised numbers, float32 [rows, inputs]."""
        values, table = self.values, TABLES.get(self.codes)
        if table is not None:
            halves = np.stack((values & 15, values >> 4), axis=2).reshape(len(values), -1)
            values = np.array(table, np.float32)[halves]
        groups = values.astype(np.float32).reshape(len(values), -1, self.group)
        with np.errstate(invalid="ignore"):  # scales of a damaged file may be infinite
            groups *= _times(self.scales, self.units)[:, :, None]
            if self.offsets is not None:
                groups += _times(self.offsets, self.offset_units)[:, :, None]
        return groups.reshape(len(values), -1)


def _times(scales: np.ndarray, units: np.ndarray | None) -> np.ndarray:
    found = scales.astype(np.float32)
    if units is not None:
        each = scales.shape[1] // units.shape[1]
        found *= np.repeat(units.astype(np.float32), each, axis=1)
    return found


def _flat(part: np.ndarray) -> np.ndarray:
    return part.reshape(len(part), -1)


def _floats(part: RawBlocks) -> np.ndarray:
    """Return float16 [rows, blocks * n] from parts of 2n bytes."""
    return _flat(np.ascontiguousarray(part).view(np.float16))


def _bytes(part: RawBlocks) -> np.ndarray:
    """Return int8 [rows, ...]."""
    return _flat(np.ascontiguousarray(part).view(np.int8))


def _halves(part: RawBlocks) -> np.ndarray:
    """Return the codes of half bytes, uint8 [..., 2, bytes], in the file's order: all lower halves
    of a run of bytes, then all upper halves."""
    return np.stack((part & 15, part >> 4), axis=-2)


def _packed(codes: np.ndarray) -> np.ndarray:
    """Pack codes of 0 to 15, uint8 [rows, ...], with input 2i in the lower half of byte i."""
    codes = _flat(codes)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _in_runs(part: RawBlocks, count: int) -> np.ndarray:
    """Cut the last axis into `count` runs."""
    return part.reshape(*part.shape[:-1], count, -1)


def _q8_0(blocks: RawBlocks) -> BlockCodes:
    return BlockCodes("int8", 32, _bytes(blocks[..., 2:]), _floats(blocks[..., :2]))


def _q4_0(blocks: RawBlocks) -> BlockCodes:
    codes = _halves(blocks[..., 2:]) ^ 8  # codes of 0 to 15 less 8, as in int4
    return BlockCodes("int4", 32, _packed(codes), _floats(blocks[..., :2]))


def _q4_1(blocks: RawBlocks) -> BlockCodes:
    scales, offsets = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return BlockCodes("uint4", 32, _packed(_halves(blocks[..., 4:])), scales, offsets)


def _q5_0(blocks: RawBlocks) -> BlockCodes:
    values = _fives(blocks[..., 2:6], blocks[..., 6:]) - np.int8(16)
    return BlockCodes("int8", 32, values, _floats(blocks[..., :2]))


def _q5_1(blocks: RawBlocks) -> BlockCodes:
    scales, offsets = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return BlockCodes("int8", 32, _fives(blocks[..., 4:8], blocks[..., 8:]), scales, offsets)


def _fives(high: RawBlocks, low: RawBlocks) -> np.ndarray:
    """Join codes of five bits, int8: the fifth bits of 32 codes are in four bytes."""
    fifth = (high[..., None] >> np.arange(8, dtype=np.uint8)) & 1  # [rows, blocks, 4, 8]
    return (_flat(_halves(low)) | (_flat(fifth) << 4)).astype(np.int8)


def _q4_k(blocks: RawBlocks) -> BlockCodes:
    scales, minima, unit, minimum_unit = _k_scales(blocks)
    values = _packed(_halves(_in_runs(blocks[..., 16:], 4)))
    return BlockCodes("uint4", 32, values, scales, minima, unit, -minimum_unit)


def _q5_k(blocks: RawBlocks) -> BlockCodes:
    scales, minima, unit, minimum_unit = _k_scales(blocks)
    # Bit i of byte j is the fifth bit of input 32 i + j.
    fifth = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    low = _halves(_in_runs(blocks[..., 48:], 4))
    values = (_flat(low) | (_flat(fifth) << 4)).astype(np.int8)
    return BlockCodes("int8", 32, values, scales, minima, unit, -minimum_unit)


def _q6_k(blocks: RawBlocks) -> BlockCodes:
    low = _flat(_halves(_in_runs(blocks[..., :128], 2)))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (_in_runs(blocks[..., 128:192], 2)[..., None, :] >> shifts) & 3
    values = (low | (_flat(high) << 4)).astype(np.int8) - np.int8(32)
    scales = _bytes(blocks[..., 192:208])
    return BlockCodes("int8", 16, values, scales, units=_floats(blocks[..., 208:]))


def _k_scales(blocks: RawBlocks) -> tuple[np.ndarray, ...]:
    """Return scales and minima of the eight groups of a Q4_K or Q5_K block, six bits each in twelve
    bytes. Return also the two float16 units that multiply scales and minima."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), axis=-1)
    return _flat(scales), _flat(minima), _floats(blocks[..., :2]), _floats(blocks[..., 2:4])


def _iq4_nl(blocks: RawBlocks) -> BlockCodes:
    return BlockCodes("nl4", 32, _packed(_halves(blocks[..., 2:])), _floats(blocks[..., :2]))


def _iq4_xs(blocks: RawBlocks) -> BlockCodes:
    # A group's six bits: four in half a byte, two in a quarter of a byte.
    low = _flat(np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1))
    high = _flat((blocks[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3)
    scales = (low | (high << 4)).astype(np.int8) - np.int8(32)
    values = _packed(_halves(_in_runs(blocks[..., 8:], 8)))
    return BlockCodes("nl4", 32, values, scales, units=_floats(blocks[..., :2]))


def _mxfp4(blocks: RawBlocks) -> BlockCodes:
    # 2 to the power of the byte less 127; 2^-127 is subnormal in bfloat16.
    exponents = blocks[..., 0].astype(np.int16)
    bits = np.where(exponents == 0, np.int16(1 << 6), exponents << 7).astype(np.int16)
    return BlockCodes("e2m1", 32, _packed(_halves(blocks[..., 1:])), bits.view(ml_dtypes.bfloat16))


READERS: dict[str, Callable[[RawBlocks], BlockCodes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Functions that take blocks apart, by the type of the blocks."""
