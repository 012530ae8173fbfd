"""Ollama's interface: answers in lines of JSON, and what is served."""
