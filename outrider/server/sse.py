"""Chunks of a stream to bytes: server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
import secrets
from typing import Any

DONE = b"data: [DONE]\n\n"
BLOCK = 512  # bytes; an obfuscated chunk is as long as the next multiple
_FIELD = ', "obfuscation": ""}'


def encode(chunk: dict[str, Any], *, obfuscate: bool = False) -> bytes:
    """One event. Obfuscated, its length tells nothing finer than a BLOCK of how much text a round brought."""
    body = json.dumps(chunk, ensure_ascii=False, allow_nan=False)
    if not obfuscate:
        return f"data: {body}\n\n".encode()
    length = len(body.encode()) + len(_FIELD) - 1
    padding = secrets.token_hex(BLOCK // 2)[: -length % BLOCK]
    return f'data: {body[:-1]}, "obfuscation": "{padding}"}}\n\n'.encode()
