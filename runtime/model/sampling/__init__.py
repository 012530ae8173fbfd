"""From logits to tokens: what rows ask for as arrays, and one sampler for every set of kernels.

`sampler` turns a step's rows into arrays (how tokens are drawn; biases, bans and penalties), adds
masks and applies the operations of a kernel set, which `kernels/reference` specifies.
`automaton_table` has the masks, in main memory or on a device that is not waited for, together with
the automata that it steps by itself.
"""
