"""From bytes to tokens: the tokens that an automaton's state allows, and forced text as tokens.

- `vocabulary`: the tokenizer as bytes, and the trie of these bytes.
- `masks`: walks the trie against an automaton, keeps the masks, groups tokens of equal effect.
- `forced_tokens`: the tokens that the tokenizer itself would choose for forced text. It uses the
  tokenizer's cuts of a text, and its merges of the pieces (`merges`).
"""
