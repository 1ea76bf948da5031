"""How many replicas hold a latency: arrivals replayed against measured costs."""
