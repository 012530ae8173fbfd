"""Models by their names, on the Hugging Face hub or in packages of the Python package index.

`local` finds or fetches the model that a user names, `download` says which files of a repository
are needed, and gets them into the cache that all tools of the hub share. Imports no torch.
"""
