"""Ways of blocks from one engine to another (`contracts.transfer`).

`shared_memory` is for engines of one machine; `tcp` and `nixl` are for others, too.
"""
