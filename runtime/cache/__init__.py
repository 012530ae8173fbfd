"""The KV cache as data: a pool of blocks and a radix tree over their tokens. NumPy only.

 root --"You are a"--+--" poet. Write"--  node: tokens of the edge, blocks with their KV, locks
                     +--" cook. Bake"--

`radix_tree` counts references to blocks and maps tokens to blocks. `node` has the tree's nodes, and
queues unlocked leaves by an eviction policy. `retention` pins prefixes and expires them. `journal`
reports changes by digest and remembers recent evictions. `tier` indexes offloaded blocks,
`suffix_index` recent texts for drafts.
"""
