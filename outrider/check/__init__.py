"""The compatibility doctor: whether a draft model or a drafting head can draft for a target, and what it takes."""
