"""When to draft, with which drafter, and how far: by measured costs and acceptance."""
