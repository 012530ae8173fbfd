"""Data and protocols between the parts of the runtime, without behaviour.

 messages     gateway <-> engine: EngineRequest down, EngineOutput up
 plan         scheduler <-> executor: StepPlan down, StepResult up
 matcher      scheduler <-> constraint backend: masks, advance, rollback
 block_store  scheduler <-> stores of offloaded blocks, and transfer between engines

Numbers only: no torch, no sockets.
"""

import os
import sys

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"

if "numpy" not in sys.modules and _BLAS_THREADS not in os.environ:
    # Threads of NumPy's BLAS spin when they begin, for a tenth of a second of each other core. No
    # product here is large enough for them.
    os.environ[_BLAS_THREADS] = "1"
    import numpy  # noqa: F401

    del os.environ[_BLAS_THREADS]
