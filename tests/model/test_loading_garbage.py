"""A start collects no garbage: what it has read must not be among that."""

import subprocess
import sys
from pathlib import Path

from tests.model.checkpoints import configs, save
from tests.native import native_library

PROGRAM = """
import gc, sys
gc.disable()
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
assert "torch" not in sys.modules
executor = ExecutorConfig(model=sys.argv[1], device="cpu", weight_cache="off", threads=1)
runner = ModelRunner.load(executor, CacheConfig(num_blocks=8), 64, 4)
assert runner.kernels == "native"
from rootlace.runtime.model.checkpoint.weights import ModelWeights
assert not [one for one in gc.get_objects() if isinstance(one, ModelWeights)]
"""


def test_weights_are_gone_when_they_are_packed(tmp_path: Path) -> None:
    """The KV pool takes the memory that is free then."""
    native_library()
    save(configs()["llama-tied"], tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
