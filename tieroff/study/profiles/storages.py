"""Which storage an operator means: numbers in an execution trace are addresses, and are used again.

A new version of a storage begins when an operator ends with it among its outputs, where it was none of its inputs and no
operator called inside made it: somebody allocated it there. Until then every mention means the version before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tieroff.study.profiles.execution_trace import Node, View


@dataclass(eq=False, slots=True)
class Version:
    """One storage between its allocation and its end.

    Attributes:
        storage: its number in the execution trace.
        number: 0 for one that was there before the first operator, then counted up per number.
        maker: id of the node that made it, or -1.
        size_bytes: as far as any tensor reaches; one without elements counts as a byte, since a trace has no empty tensors.
    """

    storage: int
    number: int
    maker: int = -1
    size_bytes: int = 1

    @property
    def name(self) -> str:
        return f"storage {self.storage}.{self.number}"


@dataclass(slots=True)
class Uses:
    """What a node reads and writes, and what it or a node inside it made: versions in order of mention, each once."""

    reads: dict[Version, None] = field(default_factory=dict)
    writes: dict[Version, None] = field(default_factory=dict)
    made: dict[Version, None] = field(default_factory=dict)


def follow_storages(nodes: Sequence[Node], device: str) -> dict[int, Uses]:
    """Returns per node id what it uses of one device's memory.

    Args:
        nodes: in order of their calls.
        device: such as "cuda:0"; storages elsewhere are left out.
    """
    walk = _Walk(device)
    for node in nodes:
        if node.is_operator:
            walk.enter(node)
    walk.leave_all()
    return walk.uses


class _Walk:
    """Nodes in order of calls, so that each is left before the next one that is not called inside it."""

    def __init__(self, device: str) -> None:
        self.uses: dict[int, Uses] = {}
        self._device = device
        self._current: dict[int, Version] = {}
        self._open: dict[int, list[Node]] = defaultdict(list)  # per thread, outermost first

    def enter(self, node: Node) -> None:
        stack = self._open[node.thread]
        while stack and stack[-1].id != node.parent:
            self._leave(stack.pop())
        stack.append(node)
        uses = self.uses[node.id] = Uses()
        # One without schema and results (a collective, say) does its work on what it is given.
        writes_all = not node.written and not node.outputs
        for position, views in enumerate(node.arguments):
            is_written = writes_all or (position < len(node.written) and node.written[position])
            for version in self._versions(views):
                uses.reads[version] = None
                if is_written:
                    uses.writes[version] = None

    def leave_all(self) -> None:
        for stack in self._open.values():
            while stack:
                self._leave(stack.pop())

    def _leave(self, node: Node) -> None:
        uses = self.uses[node.id]
        known = {view.storage for views in node.arguments for view in views} | {made.storage for made in uses.made}
        for view in node.outputs:
            if view.device == self._device and view.storage not in known:
                known.add(view.storage)
                number = self._current[view.storage].number + 1 if view.storage in self._current else 1
                made = self._current[view.storage] = Version(view.storage, number, node.id)
                uses.made[made] = None
        for version in self._versions(node.outputs):
            if version not in uses.reads:
                uses.writes[version] = None
        outer = self.uses.get(node.parent)
        if outer is not None:
            outer.made.update(uses.made)

    def _versions(self, views: Iterable[View]) -> list[Version]:
        found = []
        for view in views:
            if view.device == self._device:
                version = self._current.setdefault(view.storage, Version(view.storage, 0))
                version.size_bytes = max(version.size_bytes, view.stop_bytes)
                found.append(version)
        return found
