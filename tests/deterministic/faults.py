"""Faults of a world. Each method is a kind of `scenario.Fault`; `value` is in [0, 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.deterministic.engine import EngineProcess

if TYPE_CHECKING:
    from tests.deterministic.world import World


class Faults:
    """Faults of a scenario, with a record of those that excuse failures."""

    def __init__(self, world: World) -> None:
        self._world = world

    def do(self, kind: str, value: float) -> None:
        getattr(self, kind)(value)

    def _engine(self, value: float) -> EngineProcess | None:
        """Return one of the live engines."""
        live = self._world.live_processes
        return live[int(value * 1000) % len(live)] if live else None

    # ------------------------------------------------------------ the engine

    def kill(self, value: float) -> None:
        """kill -9, now: between two turns."""
        if (process := self._engine(value)) is not None:
            process.kill()

    def die(self, value: float) -> None:
        """Kill an engine in the middle of a step, some seams from now."""
        if (process := self._engine(value)) is not None:
            process.seams_left = 1 + int(value * 40)

    def suspend(self, value: float) -> None:
        """Suspend an engine as a whole, for a while or for ever."""
        if (process := self._engine(value)) is not None:
            process.suspended = True
            if value < 0.6:
                self._later(1.0 + 40.0 * value, process.resume)

    def stick(self, value: float) -> None:
        """Stop an engine's loop, for a while or for ever, while its heart beats."""
        if (process := self._engine(value)) is not None:
            process.stuck = True
            if value < 0.6:
                self._later(1.0 + 100.0 * value, process.resume)

    def slow(self, value: float) -> None:
        """Slow an engine's steps for some seconds."""
        if (process := self._engine(value)) is not None:
            process.slow = 1.0 + 200.0 * value**2

            def recover() -> None:
                process.slow = 1.0

            self._later(5.0 * value, recover)

    def fail(self, value: float) -> None:
        """The executor raises in some of the next steps: memory ran out, say."""
        if (process := self._engine(value)) is not None:
            process.failing = 1 + int(3 * value)

    # ------------------------------------------------------------ lines and clients

    def cut(self, value: float) -> None:
        """Break a line."""
        if line := self._world.line(value):
            line.cut()

    def darken(self, value: float) -> None:
        """Let a line go dark: neither end notices."""
        if line := self._world.line(value):
            line.dark = True

    def lag(self, value: float) -> None:
        """Slow a line's frames for a while."""
        if line := self._world.line(value):
            before, line.delay = line.delay, (1e-3, 0.5)

            def recover() -> None:
                line.delay = before

            self._later(3.0, recover)

    def block(self, value: float) -> None:
        """Let a client read nothing for a while, as with a full queue."""
        if line := self._world.line(value):
            line.ends[0].blocked = True
            self._world.pause(4.0 * value)

            def recover() -> None:
                line.ends[0].blocked = False

            self._later(4.0 * value, recover)

    def vanish(self, value: float) -> None:
        """Kill a client's process."""
        self._world.vanish(value)

    # ------------------------------------------------------------ the gateway, the clock

    def gateway(self, value: float) -> None:
        """Kill the gateway's process and restart it; some are killed again meanwhile."""
        self._world.kill_gateway()
        if value > 0.7:
            self._later(0.5 + 10.0 * value % 2.0, self._world.kill_gateway)

    def fill(self, value: float) -> None:
        """Fill the state's disk for a while; some values make room and restart the gateway."""
        self._world.disk.full = True

        def free() -> None:
            self._world.disk.full = False

        self._later(20.0 * value, free)
        if value > 0.5:
            self._later(20.0 * value + 100.0 * value % 4.0, self._world.kill_gateway)

    def jump(self, value: float) -> None:
        """Let time pass while nothing runs: the machine was suspended, or the clock was set."""
        self._world.jump(60.0 * value)

    def _later(self, seconds: float, call: object) -> None:
        self._world.loop.call_later(seconds, call)  # type: ignore[arg-type]
