"""What gateways are told of a key when its change is in force, and what is said of it: the words of every page."""

from __future__ import annotations

from dataclasses import dataclass

NOT_IN_FORCE = "This is saved, and not in force yet"
LATEST = "within 30 s at the latest"  # gateway.auth: what a gateway knows of a key is looked up again by then
REFUSED = f"gateways refuse it within a second, those that cannot be told {LATEST}"


@dataclass(slots=True)
class News:
    """Told to gateways at the end of the transaction. ``is_told``: whether they have been; False until then, and after
    it where nobody could tell them.
    """

    is_told: bool = False

    def of_the_end_of(self, name: str) -> str:
        """What whoever revoked the key of this name is told."""
        if self.is_told:
            return f"{name} opens nothing from now on."
        return f"{name} is revoked. {NOT_IN_FORCE}: gateways that could not be told refuse it {LATEST}."

    @property
    def of_a_rotation(self) -> str:
        """What whoever rotated the key is told; nothing where gateways have been."""
        if self.is_told:
            return ""
        return f"{NOT_IN_FORCE}: gateways that could not be told go by the former secret; by the new one {LATEST}."
