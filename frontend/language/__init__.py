"""What a program is written with: immutable expressions and the options they take.

`expressions` (`gen`, `select`, roles) are values that can be joined with `+` and reused;
`sampling` turns the options users write into what travels; `choices` says how `select` compares;
`failures` remembers the line of the program that made an expression, for errors.
"""
