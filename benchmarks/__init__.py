"""Figures, printed and never asserted. Each file is a program: ``python -m benchmarks.NAME``, or the file itself."""
