"""What the engine does at the events of a step."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Mode(Enum):
    """What the engine does at the events of a step.

    | mode     | when                                         | parameters, activations, optimizer                    |
    |----------|----------------------------------------------|-------------------------------------------------------|
    | IDLE     | outside training steps (inference, closed)   | fetched when read, dropped soon after                 |
    | DEMAND   | a step is recorded or measured, or has left  | everything leaves as soon as it can, and is fetched   |
    |          | the recorded sequence, or steps do not       | on its first use; except in recorded and measured     |
    |          | repeat                                       | steps as far as there is room, see on_demand.py       |
    | PLANNED  | events match the recorded ones               | as the plan says, tick by tick                        |
    | PASS     | the plan moves nothing                       | untouched                                             |
    """

    IDLE = auto()
    DEMAND = auto()
    PLANNED = auto()
    PASS = auto()


# A step asks thousands of times, and to look into an `Enum` takes 0.2 us in Python 3.11.
IDLE: Final = Mode.IDLE
DEMAND: Final = Mode.DEMAND
PLANNED: Final = Mode.PLANNED
PASS: Final = Mode.PASS
