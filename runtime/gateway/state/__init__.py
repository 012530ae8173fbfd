"""What a gateway keeps of programs in a folder, so that they go on after its death.

`records` says what is written, `log_file` how, `kept` what it amounts to; a `Journal` is the
folder, a `SessionLog` one client's part of it.
"""
