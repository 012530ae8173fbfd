"""GGUF, the file format of llama.cpp: a whole model, its tokenizer included, in one file.

`cursor` reads numbers and texts of a file and checks every bound, `values` its metadata,
`tensor_types` lists how its tensors store their numbers, and `file` opens it. None of these imports
torch or NumPy, and nothing that a file says makes them take more memory than its bytes account for.
"""
