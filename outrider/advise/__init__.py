"""Advice for a target: which drafter to use, with which draft length, up to which batch; or none, and why."""
