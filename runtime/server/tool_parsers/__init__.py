"""How models write what they think, say and call: a parser of answers for each family.

`deltas` is what every parser gives, `format` what a format is, `choose` finds that of a chat
template. `tagged` holds the formats whose calls stand between tags (Hermes and Qwen, Llama 3,
Mistral, DeepSeek), `harmony` that of gpt-oss.
"""
