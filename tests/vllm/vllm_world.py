"""How the real vLLM is served in these tests."""

KEY = "a-key-of-tests"
NAME = "demo"
WORDS = (
    *("--engine", "vllm", "--drafter", "prompt-lookup:k=3", "--dtype", "float32", "--context", "1024"),
    *("--max-running", "16", "--engine-arg=--enforce-eager", "--api-key", KEY),
    *("--engine-arg=--enable-auto-tool-choice", "--engine-arg=--tool-call-parser=hermes"),
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
START_SECONDS = 400
