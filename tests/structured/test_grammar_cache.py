"""Compiled constraints are kept within bounds, and each is built once."""

import threading
from collections.abc import Hashable
from typing import Any

import pytest

from rootlace.runtime.structured import Grammar
from rootlace.runtime.structured.compiler import GrammarCache
from rootlace.wire.errors import InvalidConstraint


class Sized:
    backend = "automaton"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def matcher(self) -> None: ...


def test_the_cache_is_bounded_by_number_and_by_bytes() -> None:
    cache = GrammarCache(max_entries=3, max_bytes=100)
    for key in range(5):
        cache.get_or_build(key, lambda: Sized(1))  # type: ignore[arg-type,return-value]
    assert [key for key in range(5) if cache.get(key)] == [2, 3, 4]
    cache.get(2)
    cache.get_or_build(9, lambda: Sized(98))  # type: ignore[arg-type,return-value]
    assert [key for key in range(10) if cache.get(key)] == [2, 4, 9]
    cache.get_or_build(8, lambda: Sized(97))  # type: ignore[arg-type,return-value]
    assert [key for key in range(10) if cache.get(key)] == [8]
    cache.get_or_build(7, lambda: Sized(1000))  # type: ignore[arg-type,return-value]
    assert [key for key in range(10) if cache.get(key)] == [7]


def test_failures_are_not_cached_as_grammars() -> None:
    cache = GrammarCache(3, 100)
    with pytest.raises(KeyError):
        cache.get_or_build("a", lambda: {}["b"])  # type: ignore[arg-type]
    assert cache.get_or_build("a", lambda: Sized(1)).nbytes == 1  # type: ignore[arg-type,return-value]


def test_a_failing_build_fails_once_for_all_that_wait() -> None:
    """Builds of one key never overlap, and a caller after the failure builds again."""
    cache = GrammarCache(3, 100)
    asked, gate = threading.Semaphore(0), threading.Event()
    builds: list[int] = []
    failures: list[Exception] = []

    class Counted(dict[Hashable, Any]):
        def __contains__(self, key: object) -> bool:
            asked.release()
            return super().__contains__(key)

    cache._building = Counted()

    def build() -> Grammar:
        builds.append(1)
        gate.wait(100)
        raise InvalidConstraint("it cannot be")

    def ask() -> None:
        try:
            cache.get_or_build("a", build)
        except InvalidConstraint as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    assert all(asked.acquire(timeout=60) for _ in threads)
    with cache._lock:  # the last of them asked while it held this
        gate.set()
    for thread in threads:
        thread.join(60)
    assert len(builds) == 1
    assert [str(error) for error in failures] == ["it cannot be"] * 10
    assert not cache._building and cache.get("a") is None
    with pytest.raises(InvalidConstraint):
        cache.get_or_build("a", build)
    assert len(builds) == 2
