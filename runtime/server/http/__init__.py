"""HTTP: the interfaces of OpenAI, Anthropic, Ollama and sglang over a served model.

`app` lists the routes; a file per interface or kind of endpoint holds bodies and handlers. Shared
parts are

- of bodies: `body` (decoding), `request_fields`, `constraints`, and for conversations
  `chat_request`;
- of running a request: `generation`, and for conversations `chat_pipeline`;
- of replies: `replies` (streams, too), `logprobs`, `errors`.

Around them stand `middleware` (keys, browsers, unknown paths) and `connections`.
"""
