"""The memory of a model and its drafter before anything is loaded: from config.json and headers alone."""
