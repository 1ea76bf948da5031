"""The engine behind OpenAI's protocol: `outrider serve`."""
