"""Models by their names on the Hugging Face hub: which files of a repository are needed, where they
are in the cache that all tools of the hub share, and how they get there. Imports no torch."""
