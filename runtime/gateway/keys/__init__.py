"""API keys: who may use the gateway, how much, and which part of the cache is whose."""
