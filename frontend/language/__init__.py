"""The language of programs: expressions, states, variables, tools and transcripts.

`expressions` (`gen`, `select`, roles) are reusable values that `+` joins. `sampling` turns users'
options into wire messages; `failures` remembers the program's line that made an expression. A
`definition` is a program's function with its parameters. A program appends to a `state` or its
forks, and reads `variables` from them. A `transcript` is a state's text with its messages. `tools`
are functions that a model may call. Two interpreters implement a state's branch: `rootlace.program`
runs the program, `rootlace.trace` finds its graph.
"""
