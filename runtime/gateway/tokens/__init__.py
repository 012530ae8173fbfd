"""Text to token ids and back, and the model's chat template.

`vocabulary` knows each token; `tokenizer` tokenizes piece by piece as if the whole had been one
string (`pieces`); `detokenizer` never gives half a character; `stops` finds stop strings across
token borders; `chat` renders conversations in which content cannot forge a role; `chat_format` is
what programs need of the chat template.
"""
