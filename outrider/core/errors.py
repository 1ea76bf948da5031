"""The exceptions Outrider raises on purpose. Each message says what, where, and what would work."""

import os
from urllib.error import URLError


class OutriderError(Exception):
    """The base class of all of them.

    OutriderError
      ConfigError     the caller asked for something impossible; raised before any work
        FetchError    a model could not be fetched; nothing half-written is left behind
      RequestError    one request is wrong; it fails alone and all others continue
        ModelError    the model's own output for one request cannot be used
      LosslessError   output differed from the target's own; never caught, always a bug
    """


class ConfigError(OutriderError):
    """The caller asked for something impossible. Raised before any work is done."""


class FetchError(ConfigError):
    """A model could not be fetched. Nothing half-written is left behind."""


class RequestError(OutriderError):
    """One request is wrong, or failed. All other requests continue."""


class ModelError(RequestError):
    """The model's own output for one request cannot be used: NaN or infinite logits. All others continue."""


class LosslessError(OutriderError):
    """Output differed from the target's own. Never caught: always a bug."""


def reason(error: Exception) -> str:
    """Why the system or a connection failed, without the numbers and class names that only Python's users know."""
    inner = error.reason if isinstance(error, URLError) else error
    if not isinstance(inner, OSError):
        return str(inner)
    if inner.errno is not None and inner.errno > 0:  # negative numbers are those of name lookups
        return os.strerror(inner.errno)
    return inner.strerror or str(inner)
