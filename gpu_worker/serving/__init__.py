"""The worker as a process on the Bus: its threads, its epochs, what an operator is told. Refuses to know models."""
