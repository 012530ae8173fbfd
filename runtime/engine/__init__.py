"""The engine process: the loop that receives, plans, runs, commits and sends.

`loop` is the loop, `steps` runs a step alone or beside the next one, `client` is the gateway's end
of the process, `compiling` holds requests whose constraint is not ready yet.
"""
