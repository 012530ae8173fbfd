"""From bytes to tokens: which tokens a state of an automaton allows, and forced text as tokens.

`vocabulary` is the tokenizer as bytes and `byte_trie` its trie. These keep the promise: `walk`
finds the tokens that an automaton survives, `table` keeps the masks, and `canonical` says which
tokens the tokenizer itself would have put for forced text, by asking how it cuts (`pretokens`) and
merges (`merges`) whatever may follow. `classes` makes it fast on a device: it groups the tokens
that do the same to every state.
"""
