"""What a call of the native kernels raises. Whoever asked for it may go on, the team too."""

from __future__ import annotations


class NativeError(RuntimeError):
    """A C++ exception ended the call; what it was to write is undefined."""


class NativeOutOfMemory(NativeError, MemoryError):
    """There was no memory for what the call keeps beside its arguments."""
