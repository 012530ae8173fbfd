"""HTTP: OpenAI's and sglang's interfaces over the gateway's branches.

`app` has the routes. A file per endpoint holds its body's type and its handler: `openai_chat`,
`openai_completions`, `native` (sglang's `/generate`), `tokenization`, `info`. They share

- what bodies hold: `body` (decoding), `openai_body`, `prompts`, `messages`, `sampling`,
  `constraints`, `conversation` (messages for chat templates), `tool_choice`;
- how a request is run: `one_shot`, by a session with a branch per prompt;
- what replies hold: `replies`, `logprobs`, `tool_calls`, `sse` (streams), `errors`.
"""
