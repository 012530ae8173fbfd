"""Regular languages: from patterns to byte automata that are built as far as they are visited.

The way of a pattern: `parse` reads it as `re` does into a tree (`syntax`, built by `trees`), `nfa`
(or `lookaround`, where it looks around) makes that an automaton over UTF-8 (`utf8`), and `dfa`
determinises the states that are visited. All of these keep the promise that a mask allows exactly
what some complete text goes on with. `emit` writes trees for other engines, `languages` asks
interegular how two languages go together. The rescue path is `limits.TooLarge`: whoever gets it
asks another engine.
"""
