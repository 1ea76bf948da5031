"""Whether the text is really unchanged: an engine, or a server, is compared with plain decoding of its own target."""
