"""JSON schemas, made ready to be enforced. `prepare` is the door; a schema goes this way:

    check ─→ conjunction ─→ shapes ─→ normal ─┬→ regular ─→ an automaton
                                              └→ mask ────→ a schema for llguidance
                                                  └→ verify: what the mask does not hold

**The promise** rests on these. `dialect` says which keywords a draft has and what shape they have
today; `check` refuses what is malformed and resolves references. `conjunction` takes schemas that
apply together apart into cases without `anyOf`, `not`, `if` and the like, `shapes` writes a case as
schemas of one type each (with `number_shapes`, `keys` and `evaluated`), and `normal` puts them
together: the normal form, whose few keywords are listed there. A keyword that a shape does not hold
is noted (`residual`); `verify` (with `keywords` and `search`) checks those, each value as soon as
it is complete.

**Speed** comes from `regular`, the writer of regular forms: of a whole schema, or of what is
declared in one that llguidance runs. `spellings` says how strings and numbers are written, with
`json_text`, `numeric_range`, `pattern` and `formats`.

**Rescue**: what llguidance cannot hold of a normal form. `mask` shows it a weaker schema and notes
what is lost; `weaken` gives up keyword after keyword where a schema is refused all the same;
`key_spelling` keeps a key from standing there under another spelling. `guidance` asks llguidance.
"""
