"""From logits to tokens: what rows ask for as arrays, and one sampler for every set of kernels.

`row_arrays` turns a step's rows into arrays: how tokens are drawn, and, by `edit_lists` and
`seen_tokens`, the biases, bans and penalties that change logits first. `sampler` adds masks to them
and applies the operations of a kernel set, which `kernels/reference` specifies. Masks lie in one of
two places: in main memory (`host_masks`), or on a device that is not waited for, together with the
automata that it steps by itself (`automaton_arena`, in the room that `arena_space` hands out).
`scores` has the log-probabilities of tokens.
"""
