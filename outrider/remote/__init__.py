"""Other servers behind this one: vLLM or Outrider, one or several, reached over HTTP."""
