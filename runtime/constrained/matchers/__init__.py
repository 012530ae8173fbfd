"""One request's place in its constraint, for each backend behind `contracts.matcher`.

The promise (no text that breaks the constraint, no dead end) is kept by

- `automaton`: a regular language on our own automaton, and `cursor`, a place in it;
- `llguidance`: what is not regular, on llguidance;
- `checked`: a mask that allows too much, a check of each completed value, and going back
  (`checked_text`: what was tried, and is excluded there).

What makes them fast and may never change an answer:

- `places`: what all requests on one automaton remember of its states;
- `hybrid`: llguidance's masks remembered by the states of an automaton of what a schema declares;
- `stepped`: a whole automaton in tables, which a device steps by itself.

Rescue paths: an automaton that grows beyond its bounds while requests run on it hands them to
llguidance (`Cursor._other_here`), a hybrid grammar whose parts disagree goes on in llguidance alone
(`HybridGrammar.keep`), and a lexer of llguidance that is full is replaced by a new one
(`llguidance_lexer`). `outlines` is a backend for compatibility.
"""
