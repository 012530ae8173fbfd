"""Few-shot evaluation: programs over a set of questions, and what came of it.

`task` is what a file says, `questions` makes and scores the prompts, `run` asks them, can be
interrupted and keeps what came out; `report` shows it.
"""
