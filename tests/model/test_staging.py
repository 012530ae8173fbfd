"""Arrays at fixed places of one buffer, host memory in rotation, results on their way back."""

import numpy as np
import pytest
import torch

from rootlace.runtime.model.executor.staging import (
    ALIGNMENT,
    ROTATION,
    HostBuffers,
    Results,
    StagingLayout,
)
from tests.model.fake_device import FakeDevice


def test_arrays_come_back_from_their_places() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.integers(-9, 9, 7).astype(np.int32),
        "b": rng.random((3, 5)),
        "none": np.empty(0, np.int64),
        "c": rng.integers(0, 2, 3).astype(bool),
        "d": rng.random(1).astype(np.float32),
    }
    layout = StagingLayout(100)
    for name, array in arrays.items():
        layout.add(name, array.dtype, array.shape)
    assert list(layout.tensors(torch.zeros(layout.stop, dtype=torch.uint8))) == list(arrays)
    memory = np.full(layout.stop, 0x7B, np.uint8)
    layout.write(memory, arrays)
    device = torch.from_numpy(memory.copy())
    stop = 100
    for name, array in arrays.items():
        field = layout.field(name)
        assert field.start % ALIGNMENT == 0 and field.start >= stop
        stop = field.stop
        np.testing.assert_array_equal(layout.device(device, name).numpy(), array)
        np.testing.assert_array_equal(layout.host(memory, name), array)
    assert stop == layout.stop
    with pytest.raises(ValueError, match="a place already"):
        layout.add("a", np.int32, (1,))


def test_a_shorter_array_leaves_the_rest_of_its_place() -> None:
    layout = StagingLayout()
    layout.add("x", np.int32, (4,))
    memory = np.zeros(layout.stop, np.uint8)
    layout.write(memory, {"x": np.arange(4, dtype=np.int32)})
    layout.write(memory, {"x": np.array([9, 9], np.int32)})
    assert layout.host(memory, "x").tolist() == [9, 9, 2, 3]


def test_a_host_buffer_is_written_again_only_when_the_device_has_read_it() -> None:
    device = FakeDevice()
    buffers = HostBuffers(device, 64)
    assert len(device.buffers) == ROTATION == len(device.events)
    taken = []
    for step in range(3 * ROTATION):
        buffer = buffers.take(64)
        event = device.events[step % ROTATION]
        assert not event.pending  # waited for, if it had to be
        assert event.waits == step // ROTATION + 1
        buffers.sent()
        assert event.pending
        taken.append(buffer.data_ptr())
    assert len(set(taken)) == ROTATION and taken[:ROTATION] == taken[ROTATION : 2 * ROTATION]


def test_a_larger_step_gets_a_larger_buffer_once() -> None:
    device = FakeDevice()
    buffers = HostBuffers(device, 64)
    for _ in range(4 * ROTATION):
        assert len(buffers.take(1000)) >= 1000
        buffers.sent()
    assert len(device.buffers) == 2 * ROTATION


def test_results_are_read_after_later_ones_were_fetched() -> None:
    device = FakeDevice()
    results = Results(device)
    rng = np.random.default_rng(0)
    given, fetched = [], []
    for size in (5, (1 << 16), 3, 2):
        tokens = torch.from_numpy(rng.integers(0, 99, size).astype(np.int32))
        scores = torch.from_numpy(rng.random((2, 3)).astype(np.float32))
        given.append((tokens.numpy().copy(), scores.numpy().copy()))
        fetched.append(results.fetch([tokens, scores]))
        tokens.zero_(), scores.zero_()  # the device goes on
    assert len(given) == Results.ROTATION
    found = [wait() for wait in fetched]
    results.fetch([torch.zeros(9, dtype=torch.int32)])
    for arrays, expected in zip(found, given, strict=True):
        for array, value in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, value)
