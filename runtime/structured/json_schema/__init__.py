"""JSON schemas, prepared for enforcement. The entry is `normal_form.PreparedSchema`:

    load -> cases -> type_shapes -> normal_form -+-> writers --------------> an automaton
                                                 +-> normal_form.mask_of --> a schema for llguidance
                                                      +-> validate: keywords that the mask lacks

- `load` refuses malformed schemas and resolves references; `cases` removes `anyOf`, `not`, `if`.
- `type_shapes` writes a case as schemas of one type each; `normal_form` puts the shapes together.
- `writers` writes regular forms, and schemas with constants in our spelling, with `json_text` and
  `pattern`.
- `to_llguidance` drops keywords that llguidance refuses; `validate` checks the dropped keywords.
"""
