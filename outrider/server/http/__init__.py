"""HTTP: errors, API keys, limits, bodies, streams and the middleware around the app."""
