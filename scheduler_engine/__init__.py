"""The step scheduler: pure, deterministic, standard library only. Time is an argument in microseconds."""
