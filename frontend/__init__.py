"""Rootlace: LLM programs laced over one root."""
