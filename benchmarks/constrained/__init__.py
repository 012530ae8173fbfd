"""The cost of constraints: compiling, masks, and serving."""
