"""OpenAI's protocol: request and response schemas, and the translation between them and the engine."""
