"""Compatibility checks: whether a draft model or a drafting head can draft for a target, and which options it needs."""
