"""Processes that tests start, and what is left of them."""

import psutil


def alive(process: psutil.Process | int) -> bool:
    """Whether it runs. One that ended counts as gone though nobody has asked for its status: where
    a parent is gone, too, that is up to the machine's first process, and not all of these ask."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
