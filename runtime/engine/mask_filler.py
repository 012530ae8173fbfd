"""Fills masks on threads of its own while the executor runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from rootlace.runtime.scheduler.masks import Job


class MaskFiller:
    """See `scheduler.masks.MaskFiller`. Matchers drop the GIL where it takes long.

    The thread that waits for masks fills some itself, so a worker that is not scheduled at once
    delays nobody.
    """

    def __init__(self, threads: int) -> None:
        """Raises ValueError for fewer than one thread."""
        if threads < 1:
            raise ValueError(f"mask_threads must be at least 1, not {threads}")
        self._work: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"masks-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, jobs: Sequence[Job]) -> Callable[[], None] | None:
        batch = _Batch(jobs)
        for _ in range(min(len(jobs), len(self._threads))):
            self._work.put(batch)
        return batch.wait

    def close(self) -> None:
        """End the threads. What was started is finished first."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (batch := self._work.get()) is not None:
            batch.work()


class _Batch:
    """The jobs of one step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._open = len(jobs)
        self._todo = deque(jobs)
        self._done: SimpleQueue[Job] = SimpleQueue()

    def work(self) -> None:
        """Run jobs until none is left that nobody has begun."""
        while True:
            try:
                job = self._todo.popleft()
            except IndexError:
                return
            job.run()
            self._done.put(job)

    def wait(self) -> None:
        """Until all jobs are done."""
        self.work()
        while self._open:
            self._done.get()
            self._open -= 1
