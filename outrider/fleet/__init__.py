"""How many replicas hold a latency, found by replaying arrivals against measured costs."""
