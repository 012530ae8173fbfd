"""From bytes to tokens: which tokens a state of an automaton allows, and forced text as tokens.

`vocabulary` is the tokenizer as bytes and `byte_trie` its trie; `walk` finds the tokens that an
automaton survives, `table` keeps the masks, `classes` the tokens that always do the same;
`canonical` says which tokens the tokenizer itself would have put for forced text.
"""
