"""Formats of thoughts, answers and calls: a parser for each family of models.

`base` defines parsers and formats, `learnt` finds the format of a chat template, and `listing`
shows tools to a model. `tagged` holds formats with calls between tags (Hermes and Qwen, Llama 3,
Mistral, DeepSeek). `tagged_arguments` holds those with tags around each argument (Qwen3-Coder, GLM
4.5), `harmony` gpt-oss's.
"""
