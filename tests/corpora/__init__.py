"""Inputs that readers of other people's bytes were given: each folder is a reader's corpus."""
