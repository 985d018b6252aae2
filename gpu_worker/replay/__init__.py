"""A worker's log: written as the engine is told, decided again, or decided under another policy."""
