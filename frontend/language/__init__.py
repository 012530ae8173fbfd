"""What a program is written with, and what stands behind it.

`expressions` (`gen`, `select`, roles) are values that can be joined with `+` and reused;
`sampling` turns the options users write into what travels; `choices` says how `select` compares;
`failures` remembers the line of the program that made an expression, for errors. A `definition` is
a program's function with its parameters. `state` and `fork` are what it appends to and reads
`variables` from (in `async def` programs: `awaited`). A `transcript` is a state's text with its
messages, and a `saved` state one that outlives its runtime. `tools` are functions that a model may
call (`mcp_tools`: those of a server), `tool_calls` runs them. Behind a state stands one of two
interpreters (`interpreter` says what they must offer): `rootlace.program` runs the program,
`rootlace.trace` finds its graph.
"""
