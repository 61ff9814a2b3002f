"""What one device of a partition does in a step, as a Trace: offloading is planned for it as for any other step.

Every device does the same. An op takes its share of the whole op's time, and the time of what is exchanged around it; the
update of a parameter touches it, its gradient and the optimizer's state, as long as the device's memory takes for that.
"""

from __future__ import annotations

from tieroff.core.machine import Machine
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.study.sharding.tofu import Partition
from tieroff.units import NS_PER_S

_CLASSES = {
    "parameter": TensorClass.PARAMETER,
    "gradient": TensorClass.GRADIENT,
    "activation": TensorClass.ACTIVATION,
    "input": TensorClass.INPUT,
}
_UPDATE_TOUCHES = 7
"""Of a parameter's bytes: AdamW reads it, its gradient and two of state, and writes all but the gradient."""


def local_trace(partition: Partition, machine: Machine, min_bytes: int) -> Trace:
    """Returns one device's step; tensors below `min_bytes` are left out.

    Raises:
        ConfigError: bytes are exchanged, but the machine gives no bandwidth between devices.
    """
    return _LocalStep(partition, machine, min_bytes).trace()


class _LocalStep:
    def __init__(self, partition: Partition, machine: Machine, min_bytes: int) -> None:
        self._partition, self._machine = partition, machine
        levels = len(partition.levels)
        self._rates = machine.peer_rates(levels) if partition.exchanged_bytes else (1,) * levels
        self._graph = partition.graph
        self._tensors: list[Tensor] = []
        self._place: dict[int, int] = {}
        self._gradients = {t.owner: i for i, t in enumerate(self._graph.tensors) if t.owner >= 0}
        kinds = {i: t.kind for i, t in enumerate(self._graph.tensors)}
        for index, tensor in enumerate(self._graph.tensors):
            if kinds[index] == "gradient" and tensor.root != index:  # a gradient may be a view of what made it
                kinds[tensor.root] = "gradient" if kinds[tensor.root] == "activation" else kinds[tensor.root]
        used = {self._root(i) for op in self._graph.ops for i in (*op.inputs, *op.outputs)}
        for root in sorted(used):
            self._add(root, kinds[root], min_bytes)

    def _root(self, tensor: int) -> int:
        root = self._graph.tensors[tensor].root
        return root if root >= 0 else tensor

    def _add(self, root: int, kind: str, min_bytes: int) -> None:
        tensor = self._graph.tensors[root]
        size = self._partition.local_bytes(root)
        if size < max(min_bytes, 1):
            return
        self._place[root] = len(self._tensors)
        persists = kind in ("parameter", "input")
        self._tensors.append(
            Tensor(f"{tensor.name}#{root}", size, _CLASSES[kind], is_persistent=persists, is_movable=kind != "input")
        )

    def trace(self) -> Trace:
        """Returns the trace."""
        count = self._partition.device_count
        ops = []
        for position, op in enumerate(self._graph.ops):
            inputs, outputs = self._listed(op.inputs), self._listed(op.outputs)
            duration = op.duration_ns // count + self._exchange_ns(position)
            ops.append(Op(op.name, duration, inputs, outputs, phase="forward"))
        ops += self._updates()
        return Trace(tuple(ops), tuple(self._tensors), name=f"{self._graph.name} on {count} devices", origin="dry")

    def _listed(self, tensors: tuple[int, ...]) -> tuple[int, ...]:
        roots = dict.fromkeys(self._root(tensor) for tensor in tensors)
        return tuple(self._place[root] for root in roots if root in self._place)

    def _exchange_ns(self, position: int) -> int:
        """Returns the time of what one device exchanges around an op; -1 for the update."""
        pairs = zip(self._partition.op_bytes[position], self._rates, strict=True)
        return round(sum(size / self._partition.device_count / rate for size, rate in pairs) * NS_PER_S)

    def _updates(self) -> list[Op]:
        ops = []
        for parameter, gradient in self._gradients.items():
            place = self._place.get(parameter)
            if place is None:
                continue
            size = self._tensors[place].size_bytes
            name = self._graph.tensors[parameter].name
            state = len(self._tensors)
            self._tensors.append(
                Tensor(f"state:{name}", size * self._graph.state_share, TensorClass.OPTIMIZER, is_persistent=True)
            )
            duration = round(_UPDATE_TOUCHES * size / self._machine.device_memory_bytes_per_s * NS_PER_S)
            reads = (place, state, *self._listed((gradient,)))
            ops.append(Op(f"update:{name}", duration, reads, (place, state), phase="optimizer"))
        end = Op("end", self._exchange_ns(-1))
        return [*ops, end]
