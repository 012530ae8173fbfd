"""The language of programs, and the state behind it.

`expressions` (`gen`, `select`, roles) are values that can be joined with `+` and reused; `sampling`
turns the options users write into what travels; `failures` remembers the line of the program that
made an expression. A `definition` is a program's function with its parameters. A `state`, or each
of its forks, is what a program appends to and reads `variables` from. A `transcript` is a state's
text with its messages, also saved. `tools` are functions that a model may call, and run. Behind a
state stands one of two interpreters: `rootlace.program` runs the program, `rootlace.trace` finds
its graph.
"""
