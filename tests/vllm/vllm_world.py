"""How the real vLLM is served in these tests: the demo model."""

KEY = "a-key-of-tests"
NAME = "demo"
WORDS = ("--context", "1024", "--api-key", KEY)
