"""What training writes to the drives, and how long they last."""

from __future__ import annotations

from dataclasses import dataclass

_SECONDS_PER_DAY = 86_400
_DAYS_PER_YEAR = 365.25
_TERABYTE = 10**12


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes written to all drives together.

    Attributes:
        step_bytes: per step.
        day_bytes: in a day of steps one after another.
        endurance_bytes: that the drives take in their life, 0 if unknown.
    """

    step_bytes: int
    day_bytes: float
    endurance_bytes: int = 0

    @property
    def life_days(self) -> float | None:
        """Days of training until the drives have reached their rated endurance; None if unknown."""
        return self.endurance_bytes / self.day_bytes if self.endurance_bytes and self.day_bytes else None

    @property
    def life(self) -> str:
        """The same for people; "" if unknown."""
        days = self.life_days
        if days is None:
            return ""
        return f"{days / _DAYS_PER_YEAR:.1f} years" if days >= _DAYS_PER_YEAR else f"{days:.0f} days"

    def __str__(self) -> str:
        text = f"A day of training writes {self.day_bytes / _TERABYTE:.1f} TB to the drives"
        if not self.life:
            return f"{text}; how long they last is not known (the machine has no nvme_endurance_bytes)."
        return f"{text}, of the {self.endurance_bytes / _TERABYTE:.0f} TB that they take in their life: {self.life} of it."


def wear_of(step_bytes: int, step_s: float, endurance_bytes: int = 0) -> Wear | None:
    """Returns the wear of steps that each write this much in this time; None when nothing is written or no time passes."""
    if not step_bytes or not step_s:
        return None
    return Wear(step_bytes, step_bytes / step_s * _SECONDS_PER_DAY, endurance_bytes)
