"""Effects in the engine's process of facts that a compiler learns."""

import gc
from typing import Any

from rootlace.runtime.engine.constraints import prepare


class Learns:
    def prepare(self) -> None:
        self.learnt = [[number] for number in range(1000)]


def test_collections_do_not_look_at_what_a_compiler_learnt() -> None:
    compiler: Any = Learns()
    prepare(compiler)
    looked_at = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in looked_at for one in [compiler.learnt, *compiler.learnt])
