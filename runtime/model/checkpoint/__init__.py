"""A checkpoint on disk: `config`, its weights (`loader`) and how layers hold them (`weights`)."""
