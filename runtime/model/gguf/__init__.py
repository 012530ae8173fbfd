"""GGUF, the file format of llama.cpp: a whole model, its tokenizer included, in one file.

`file` reads metadata and the table of tensors and checks every bound; `config` and `architectures`
make a `config.json` of the metadata, `tokenizer` a `tokenizer.json`. None of these imports torch or
NumPy. Every size that a file states is checked against the bytes it has before memory is taken, so
memory grows only with the file: lists of numbers take as much as their bytes, while keys, texts,
truth values and the table of tensors become Python objects, of up to 30 times their bytes.
"""
