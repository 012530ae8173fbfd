"""Messages between ranks, and the time that ranks wait for messages."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rootlace.runtime.model.parallel import group as group_file
from rootlace.runtime.model.parallel.group import Group

CPU = torch.device("cpu")


def test_rank_0_waits_for_no_rank_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank reported that it had loaded, and never comes."""
    monkeypatch.setattr(group_file, "FIRST_WAIT", timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        Group(tmp_path / "group", 0, 2, CPU, lambda: None).agree(1)
