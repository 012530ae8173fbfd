"""Run worlds by their seeds: `python -m tests.deterministic --seeds 0:100`."""

import sys

from tests.deterministic.cli import main

sys.exit(main())
