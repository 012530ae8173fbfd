"""What users write: constraints as they come, read into trees, schemas or grammars.

`source` is the text of a `Constraint`; `ebnf` (with `gbnf`, `grammar_rules` and `lexemes`) reads
grammars; `structural_tag` (with `tag_formats`, `literals`, `free_text` and `rules`) free text with
constrained islands; `embedded_schemas` schemas in Lark.
"""
