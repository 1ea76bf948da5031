"""Which drafter to use for a target, at which length, up to which load; or none, and why."""
