"""Regular languages: from patterns to byte automata that grow as states are visited.

    text -> parse -> syntax (trees) -> nfa, or lookaround -> lazy_dfa -> the states a request visits
                                  \\-> pattern_of: other engines

A mask from `lazy_dfa` allows exactly the bytes that some complete text continues with. Where an
automaton would be too large, `syntax.TooLarge` sends the caller to another engine.
"""
