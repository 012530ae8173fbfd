"""Few-shot evaluation: programs over a set of questions, and their results.

`task` reads a task's file, and `questions` makes and scores the prompts. `run` asks the questions,
resumably, and stores the results; `report` shows them.
"""
