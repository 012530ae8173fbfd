"""Read GGUF, llama.cpp's file format: a whole model, its tokenizer included, in one file.

`file` reads metadata and the table of tensors and checks every bound. `config` and `architectures`
make a `config.json` of the metadata, `tokenizer` a `tokenizer.json`. None of these modules imports
torch or NumPy. Every stated size is checked against the file's bytes before memory is allocated:
memory grows only with the file. Lists of numbers take as much memory as their bytes. Keys, texts,
truth values and the table of tensors become Python objects, of up to 30 times their bytes.
"""
