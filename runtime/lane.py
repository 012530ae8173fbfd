"""Daemon threads that run the jobs of a queue; one that is stuck is replaced."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

TICK_SECONDS = 0.5


class Job(Protocol):
    started: float | None
    """When its bounded part began (`time.thread_time`), set by whoever runs it."""


J = TypeVar("J", bound=Job)


class Lane(Generic[J]):
    """`threads` daemon threads that call `work(job)`; started at the first job.

    The jobs of one client run in order; clients take turns, job by job. A job that several clients
    want runs when it is the turn of the first of them.

    A job that computes for more than `seconds` is handed to `overdue` (on another thread); the
    thread that runs it gets a successor, and ends once the job returns. Neither function may raise.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        work: Callable[[J], None],
        overdue: Callable[[J], None] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._name = name
        self._threads = threads
        self._work = work
        self._overdue = overdue
        self._seconds = seconds
        self._queues: OrderedDict[str, deque[J]] = OrderedDict()
        """Of clients who have some, that of whose turn it is first."""
        self._clients: dict[J, list[str]] = {}
        """Whose queues a job waits in."""
        self._running: dict[threading.Thread, J] = {}
        self._changed = threading.Condition()
        self._started = False
        self._closed = False

    def put(self, job: J, clients: Iterable[str] = ("",)) -> bool:
        """Run it when it is the turn of one of these, at least one. False if the lane is closed."""
        with self._changed:
            if self._closed:
                return False
            self._clients[job] = []
            for client in clients:
                self._queue(job, client)
            if not self._started:
                self._started = True
                for _ in range(self._threads):
                    self._spawn(self._loop)
                if self._overdue is not None:
                    self._spawn(self._watch)
            self._changed.notify_all()
            return True

    def want(self, job: J, client: str) -> None:
        """Another client wants this job, too, if it still waits."""
        with self._changed:
            if job in self._clients:
                self._queue(job, client)

    def close(self) -> list[J]:
        """Take no more jobs. Returns those that wait, which are never run, and those that run,
        which are not waited for."""
        with self._changed:
            self._closed = True
            left = [*self._clients, *self._running.values()]
            self._queues.clear()
            self._clients.clear()
            self._changed.notify_all()
            return left

    def _spawn(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=self._name, daemon=True).start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._queues and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._running[me] = self._take()
                self._changed.notify_all()
            self._work(job)
            with self._changed:
                if self._running.pop(me, None) is None:
                    return  # somebody else has taken this thread's place

    def _queue(self, job: J, client: str) -> None:
        if client not in self._clients[job]:
            self._clients[job].append(client)
            self._queues.setdefault(client, deque()).append(job)

    def _take(self) -> J:
        first = next(iter(self._queues))
        job = self._queues[first][0]
        self._queues.move_to_end(first)
        for client in self._clients.pop(job):
            self._queues[client].remove(job)
            if not self._queues[client]:
                del self._queues[client]
        return job

    def _watch(self) -> None:
        assert self._overdue is not None
        while True:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(TICK_SECONDS if self._running else None)
                late = {
                    thread: job
                    for thread, job in self._running.items()
                    if job.started is not None
                    and _thread_time(thread) - job.started > self._seconds
                }
                for thread in late:
                    del self._running[thread]
                    self._spawn(self._loop)
            for job in late.values():
                self._overdue(job)


def _thread_time(thread: threading.Thread) -> float:
    """What `time.thread_time` says in a thread that is running."""
    assert thread.ident is not None
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0  # such a system does not say: nothing is ever overdue
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
