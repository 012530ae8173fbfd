"""Several engine processes of one model, which the gateway uses as if they were one; no torch.

`replicas` starts them and, when one dies, lets another one go on; `dispatch` sends requests where
they cost least (`rootlace.runtime.routing`), `hearing` notices what was lost of what engines say of
their caches, `answers` makes one of several answers. `handover` has some of them compute prompts
for the others.
"""

from rootlace.runtime.replicas.handover import Apart, apart_of, transfer_of
from rootlace.runtime.replicas.replicas import Replicas

__all__ = ["Apart", "Replicas", "apart_of", "transfer_of"]
