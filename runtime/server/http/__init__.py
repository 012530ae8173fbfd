"""HTTP: the interfaces of OpenAI, Anthropic, Ollama and sglang over a served model.

`app` lists the routes; a file per interface or kind of endpoint holds bodies and handlers. They
share

- what bodies hold: `body` (decoding), `request_fields`, `constraints`, and for conversations
  `chat_request`;
- how a request is run: `generation`, and for conversations `chat_pipeline`;
- what replies hold: `replies` (streams, too), `logprobs`, `errors`.

Around them stand `middleware` (keys, browsers, unknown paths) and `connections`.
"""
