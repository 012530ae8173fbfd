"""Few-shot evaluation: programs over a set of questions, and what came of it.

`task` is what a file says, `formats` know the well-known data sets, `questions` makes the prompts,
`programs` ask them, `scoring` compares, `run` does it all and can be interrupted; `results`,
`statistics`, `comparison`, `table` and `page` are about what came out.
"""
