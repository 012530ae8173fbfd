"""HTTP: OpenAI's and sglang's interfaces over the gateway's branches."""
