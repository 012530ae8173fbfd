"""One request's place in its constraint, for each backend behind `contracts.matcher`.

`automaton` is exact and fast, `hybrid` remembers llguidance's answers by an automaton's states,
`llguidance` and `outlines` wrap other engines, `checked` adds a check and going back to any of
them, `stepped` lets a device step an automaton by itself.
"""
