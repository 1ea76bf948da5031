"""Jobs, the queue that is fair between clients, and the thread that runs the engine."""
