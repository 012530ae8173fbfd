"""Few-shot evaluation: programs over a set of questions, and what came of it.

`task` is what a file says, `questions` makes and scores the prompts, `run` asks them and can be
interrupted; `results` are what came out, `report` shows them.
"""
