"""Many questions about one long document, answered in one batch, without a server.

    python examples/batch_documents.py [--document FILE] [--model demo]

The document is prefilled once: its keys and values stay in the cache, and the other questions
share them. Answers quote the document, which is what `suffix` drafts from.
The demo model is very small, and many of its answers are wrong: name a larger one with --model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from outrider import LLM
from outrider.core.errors import ConfigError
from outrider.engine.stats import total

DOCUMENT = Path(__file__).parents[1] / "docs" / "lossless.md"
QUESTIONS = (
    "What is this document about?",
    "Quote the first sentence of the document.",
    "Quote the title of the document.",
    "Name two things the document claims.",
    "Name one thing the document does not claim.",
    "Quote a sentence with a number in it.",
    "Who should read this document?",
    "Summarise the document in one sentence.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask many questions about one document.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--characters", type=int, default=4000, help="of the document to read, from its beginning")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    document = args.document.read_text()[: args.characters]
    llm = LLM(args.model, drafter=args.drafter)
    asked = [f"{document}\n\n{question}" for question in QUESTIONS]

    began = time.perf_counter()
    first = llm.chat(asked[0], max_tokens=args.max_tokens)
    results = [first, *llm.chat(asked[1:], max_tokens=args.max_tokens)]
    seconds = time.perf_counter() - began

    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"{question}\n    {result.text.strip()}")
    stats = total(result.stats for result in results)
    print(f"\nprompts: {stats.prompt_tokens} tokens, {stats.shared_tokens} of them read only once and shared")
    print(f"answers: {stats.tokens} tokens in {stats.passes} passes, α {stats.alpha:.2f}")
    print(f"{seconds:.1f} s in all, {stats.tokens / seconds:.1f} tokens a second")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
