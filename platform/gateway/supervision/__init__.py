"""Keeps the platform's processes alive on one machine. Knows processes; refuses to know what they compute."""
