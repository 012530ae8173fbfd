"""Choice of a replica for each request, where several engines serve one model. NumPy only.

`index` knows the prefixes in each replica's cache; `router` finds the replica of least cost.
"""
