"""The simulator's rooms: traffic, the run on a virtual clock, and what is told of it. Never a second scheduler."""
