"""Proof that speculation changes no text: an engine or a server is compared with plain decoding of its own target."""
