"""OpenAI's interface: chat completions, responses and completions."""
