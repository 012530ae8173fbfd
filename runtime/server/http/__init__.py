"""HTTP: the interfaces of OpenAI, Anthropic, Ollama and sglang over a served model.

`app` has the routes. A file per endpoint holds its body's type and its handler: those of `openai`,
`anthropic` and `ollama`, and `native` (sglang's `/generate`), `tokenization`, `info`. They share

- what bodies hold: `body` (decoding), `fields` (which are served), `prompts`, `sampling`,
  `constraints`, and for conversations `chat`;
- how a request is run: `generation`, and for conversations `chat_pipeline`;
- what replies hold: `replies`, `logprobs`, `sse` (streams), `errors`.

Around them stand `auth`, `browsers` (web pages), `request_id` and `unknown_paths`.
"""
