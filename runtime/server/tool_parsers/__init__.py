"""How models write what they think, say and call: a parser of answers for each family.

`base` says what a parser gives and what a format is, `listing` finds the format of a chat template.
`tagged` holds the formats whose calls stand between tags (Hermes and Qwen, Llama 3, Mistral,
DeepSeek), `tagged_arguments` those with tags around each argument (Qwen3-Coder, GLM 4.5), `harmony`
that of gpt-oss.
"""
