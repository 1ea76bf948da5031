"""The facts of many documents as JSON, in one batch, without a server.

    python examples/batch_documents.py [--model demo]
    python examples/batch_documents.py --documents FILE      # a document a line

All prompts begin with the same examples, which are prefilled once: their keys and values stay in
the cache, and the other prompts share them. A JSON schema makes every answer valid, and the tokens
it forces are drafted; names and places are drafted from the document. All is done twice, without
drafts and with them.

The demo model, SmolLM2-135M, is very small: it can copy facts out of a sentence that looks like the
examples, and is often wrong about anything else. Larger models need no such help.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.core.errors import ConfigError
from outrider.engine.results import Result
from outrider.engine.stats import total
from outrider.grammar import GrammarSpec

FIELDS = ("name_of_course", "name_of_teacher", "day_of_week", "place", "price_in_words")
EXAMPLES = {
    "Bicycle repair. Your teacher is Tom Hale. We meet every Wednesday in the yard, and the price is twenty euros.": (
        *("Bicycle repair", "Tom Hale", "Wednesday", "the yard", "twenty euros"),
    ),
    "Pottery. Your teacher is Anna Berg. We meet every Monday in the old workshop, and the price is forty euros.": (
        *("Pottery", "Anna Berg", "Monday", "the old workshop", "forty euros"),
    ),
    "Spanish. Your teacher is Luis Ortega. We meet every Tuesday in room 12, and the price is sixty euros.": (
        *("Spanish", "Luis Ortega", "Tuesday", "room 12", "sixty euros"),
    ),
}
DOCUMENTS = (
    "Choir. Your teacher is Clara Weiss. We meet every Thursday in the main hall, and the price is five euros.",
    "Baking. Your teacher is Omar Haddad. We meet every Friday in the kitchen, and the price is thirty euros.",
    "First aid. Your teacher is Karin Lindqvist. We meet every Saturday in room 3, and the price is fifteen euros.",
    "Chess. Your teacher is Victor Petrov. We meet every Wednesday in the library, and the price is ten euros.",
    "Sailing. Your teacher is Carl Brandt. We meet every Friday in the harbour, and the price is ninety euros.",
    "Guitar. Your teacher is Ivan Novak. We meet every Tuesday in the music room, and the price is eight euros.",
)
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 40} for name in FIELDS},
    "required": list(FIELDS),
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the facts of many documents as JSON.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--documents", type=Path, help="a text file with a document a line; six notices by default")
    parser.add_argument("--max-tokens", type=int, default=120)
    args = parser.parse_args()

    documents = args.documents.read_text().splitlines() if args.documents else DOCUMENTS
    llm = LLM(args.model, drafter=args.drafter)
    read(llm, args.max_tokens, documents[:1], salt="first")  # the first passes are slower than those after
    plain, seconds_plain = read(llm, args.max_tokens, documents, max_draft=0, salt="plain")
    drafted, seconds = read(llm, args.max_tokens, documents, salt="drafted")

    for document, result in zip(documents, drafted, strict=True):
        print(f"{document}\n    {result.text}")
    before, after = (total(each.stats for each in results) for results in (plain, drafted))
    print(f"\nprompts: {after.prompt_tokens} tokens, {after.shared_tokens} of them found in the cache")
    print(f"answers: {after.tokens} tokens, {after.all.accepted} of them accepted draft tokens")
    print(f"passes: {before.passes} without drafts, {after.passes} with them")
    print(f"seconds: {seconds_plain:.2f} without drafts, {seconds:.2f} with them")
    same = [each.text for each in plain] == [each.text for each in drafted]
    print(f"identical: {'yes' if same else 'NO'}")


def prompt_of(document: str) -> str:
    shown = [
        f"Notice: {text}\nFacts: {json.dumps(dict(zip(FIELDS, facts, strict=True)))}\n\n"
        for text, facts in EXAMPLES.items()
    ]
    return f"Notices, and the facts of each as JSON.\n\n{''.join(shown)}Notice: {document}\nFacts: "


def read(llm: LLM, max_tokens: int, documents: Sequence[str], **options: Any) -> tuple[list[Result], float]:
    """The facts of each document, and the seconds it took. The first prompt fills the cache for the others."""
    options |= {"max_tokens": max_tokens, "constraint": GrammarSpec.json_schema(SCHEMA, whitespace="line")}
    prompts = [prompt_of(document) for document in documents]
    began = time.perf_counter()
    results = [llm.generate(prompts[0], **options), *llm.generate(prompts[1:], **options)]
    return results, time.perf_counter() - began


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
