"""JSON Schema: what is wrong with one, what a mask can hold of it, and what must be checked."""
