"""Regular languages: from patterns to byte automata that are built as far as they are visited."""
