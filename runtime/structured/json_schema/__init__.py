"""JSON schemas, made ready to be enforced. `normal_form.PreparedSchema` is
the door:

    load -> cases -> type_shapes -> normal_form -+-> writers --------------> an automaton
                                                 +-> normal_form.mask_of --> a schema for llguidance
                                                      +-> validate: what the mask does not hold

- `load` refuses malformed schemas and resolves references; `cases` removes `anyOf`, `not`, `if`.
- `type_shapes` writes a case as schemas of one type each; `normal_form` puts the shapes together.
- `writers` writes regular forms, and those with constants in our spelling, with `json_text` and
  `pattern`.
- `to_llguidance` gives up keywords that llguidance refuses; `validate` checks the lost keywords.
"""
