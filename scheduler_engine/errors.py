"""What must never happen, raised always."""


class EngineError(Exception):
    """Root of the engine's own exceptions."""


class BrokenBooks(EngineError):
    """A holder of something scarce no longer adds up. Carries what was counted and what was expected."""


class Misuse(EngineError):
    """A caller broke the protocol: a result for another step, a second plan before the first was applied."""


class PolicyError(EngineError):
    """A policy that cannot be: names the field and what would be right."""
