"""The ranks of one launch: what they share on a machine, and how they agree on the budget of their plans.

[Note: agreement without a collective]
Plans are made inside a training loop, and not on every rank in the same step: a rank whose second batch has another shape
plans later. A collective on the user's process group at that moment could be matched with another rank's gradient
reduction, which would corrupt gradients or hang. Ranks therefore agree over the group's key-value store, which no
collective uses:

1. A rank *enters* when its first recorded step begins.
2. It *publishes* its budget and its least need when its next step begins.
3. It *settles* when it makes its first plan, at the earliest one step later: it reads the entries of all ranks that
   entered, and waits for those that are missing.

No two ranks can wait for each other, because publishing waits for nobody. Where ranks synchronise in each step (DDP, FSDP), all
have published before any of them settles. A rank that never wraps a model does not enter, so nobody waits for it; one whose
first step cannot be traced leaves. A rank that enters and then stops causes an error that names it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tieroff.core.machine import Machine
from tieroff.errors import ConfigError, StateError

WAIT_S = 300.0
"""How long a rank waits for another one that has begun to train."""

_POLL_S = 0.01
_LEFT = "left"

_T = TypeVar("_T")

on_wrap: ContextVar[Callable[[Any], None] | None] = ContextVar("on_wrap", default=None)
"""Called with the engine of each wrapped model; `tieroff launch` sets it in its ranks to collect figures."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process of a launch this is.

    Attributes:
        rank, world: its number among all processes, and how many they are.
        local_rank, local_world: the same among those on this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Reads the variables that torchrun and `tieroff launch` set; without them this is a single rank.

        Raises:
            ConfigError: a variable holds no valid number.
        """
        variables = {
            "RANK": os.environ.get("RANK"),
            "WORLD_SIZE": os.environ.get("WORLD_SIZE"),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK"),
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
        }
        for name, text in variables.items():
            if text is not None and not (text.isdigit() and int(text) >= name.endswith("SIZE")):
                raise ConfigError(f"expected the environment variable {name} to hold a rank's number or count, got {text!r}")
        rank, world = int(variables["RANK"] or 0), int(variables["WORLD_SIZE"] or 1)
        return cls(rank, world, int(variables["LOCAL_RANK"] or 0), int(variables["LOCAL_WORLD_SIZE"] or 1))

    def share_bytes(self, size_bytes: int) -> int:
        """Returns this rank's part of something that the ranks of a machine share equally, rounded down."""
        return size_bytes // self.local_world

    def share_machine(self, machine: Machine, device: str) -> Machine:
        """Returns the machine as one of its ranks has it while the others use it too.

        All ranks share the drives, the CPU and the host's memory; on the CPU backend also what copies. Each GPU has a link of
        its own.

        Args:
            machine: measured with nothing else running.
            device: "cuda" or "cpu".
        """
        if self.local_world == 1:
            return machine
        shared = ["nvme_write", "nvme_read", "cpu_update", "host_memory", *(("d2h", "h2d") if device == "cpu" else ())]
        rates = {f"{link}_bytes_per_s": getattr(machine, f"{link}_bytes_per_s") for link in shared}
        parts: dict[str, Any] = {name: max(rate // self.local_world, 1) for name, rate in rates.items() if rate}
        return replace(machine, **parts)


class KeyValueStore(Protocol):
    """The calls of torch's stores that are used."""

    def set(self, key: str, value: str) -> object:
        """Gives the key a value that every rank sees."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns what it holds then."""

    def check(self, keys: list[str]) -> bool:
        """True when all the keys are there."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank's first traced step may use of its device (`budget_bytes`) and needs at least (`floor_bytes`)."""

    budget_bytes: int
    floor_bytes: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Agreed:
    """The smallest budget of all ranks, and the largest need, each with the rank that has it."""

    budget: Need
    floor: Need


class Agreement:
    """One model's ranks agree on their device budget; see [Note: agreement without a collective].

    Args:
        store: shared by all ranks.
        rank, world: this process, and how many there are.
        wait_s: how long to wait for a rank that entered.

    Raises:
        StateError: by all methods, when the store cannot be reached: the process that holds it has ended.
    """

    def __init__(self, store: KeyValueStore, rank: int, world: int, wait_s: float = WAIT_S) -> None:
        self._store, self._rank, self._world, self._wait_s = store, rank, world, wait_s
        self._own: Need | None = None  # by this rank
        self._agreed: Agreed | None = None
        # A model is identified by the order in which its rank first trains it.
        number = self._reach(lambda: store.add(f"tieroff/models of {rank}", 1))
        self._prefix = f"tieroff/model {number}"
        # By `add`, which waits for the store's answer: torch's TCPStore sends a `set` and goes on, so that a rank that looks
        # once (`_others`) may not see what another has set long before.
        self._reach(lambda: store.add(self._key("entered", rank), 1))

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what} {rank}"

    def publish(self, budget_bytes: int, floor_bytes: int) -> None:
        """Publishes what the first traced step may use and needs. Later calls change nothing."""
        if self._own is not None:
            return
        self._own = Need(budget_bytes, floor_bytes, self._rank)
        self._reach(lambda: self._store.set(self._key("need", self._rank), f"{budget_bytes} {floor_bytes}"))

    def leave(self) -> None:
        """Publishes that this rank plans for itself, so that nobody waits for it."""
        self._reach(lambda: self._store.set(self._key("need", self._rank), _LEFT))

    def settle(self) -> Agreed | None:
        """Returns what the ranks that train agree on, the same at every call; None before this rank has published its need.

        Raises:
            StateError: a rank began to train and did not end its first step in time.
        """
        if self._agreed is None and self._own is not None:
            needs = [self._own, *self._others()]
            self._agreed = Agreed(
                min(needs, key=lambda need: (need.budget_bytes, need.rank)),
                max(needs, key=lambda need: (need.floor_bytes, -need.rank)),
            )
        return self._agreed

    def _others(self) -> list[Need]:
        others = [rank for rank in range(self._world) if rank != self._rank]
        entered = [rank for rank in others if self._has("entered", [rank])]
        deadline_s = time.monotonic() + self._wait_s
        while not self._has("need", entered):
            if time.monotonic() > deadline_s:
                silent = [rank for rank in entered if not self._has("need", [rank])]
                raise StateError(
                    f"rank {self._rank} makes its plan and expected every rank that trains this model to have ended its first "
                    f"step within {self._wait_s:g} s, but rank {', '.join(map(str, silent))} has not: it hangs, has ended, "
                    "or trains in another rhythm; look at its log. Ranks that take their steps independently of each other "
                    "should wrap their models without a process group"
                )
            time.sleep(_POLL_S)
        return [need for rank in entered if (need := self._need_of(rank)) is not None]

    def _need_of(self, rank: int) -> Need | None:
        text = self._reach(lambda: self._store.get(self._key("need", rank))).decode()
        if text == _LEFT:
            return None
        budget_bytes, floor_bytes = map(int, text.split())
        return Need(budget_bytes, floor_bytes, rank)

    def _has(self, what: str, ranks: list[int]) -> bool:
        keys = [self._key(what, rank) for rank in ranks]
        return not keys or self._reach(lambda: self._store.check(keys))

    def _reach(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:  # all of torch's errors about its stores are
            raise StateError(
                f"rank {self._rank} could not reach the process group's store to agree with the other ranks on a budget: "
                f"{error}; the process that holds it (rank 0's, or the launcher's) has probably ended"
            ) from error


def agreement_here() -> Agreement | None:
    """Returns the agreement of the model that begins to train now; None without a process group of several ranks."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    # The one private name: torch has no public one for the store that init_process_group made.
    store = distributed.distributed_c10d._get_default_store()
    return Agreement(store, distributed.get_rank(), distributed.get_world_size())
