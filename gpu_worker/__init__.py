"""The GPU worker: one process drives one device. No Django anywhere in it."""
