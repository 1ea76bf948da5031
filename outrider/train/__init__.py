"""Trains drafters: collects a target's answers, trains a head over its hidden states, and reports what it is worth."""
