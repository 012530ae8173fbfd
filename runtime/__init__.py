"""The runtime: everything that runs in the processes of a server.

A token's way: `gateway` (branches, text, HTTP) → `engine` (the loop) → `scheduler` over `cache`
(what is computed when) → `model` (the executor) → and back. `contracts` are the data that cross
these borders, `constrained` turns schemas and grammars into token masks, `simulation` replays
traces through the real scheduler without a model, `doctor` says what this machine is and reaches,
`config` has one frozen dataclass per part.
"""
