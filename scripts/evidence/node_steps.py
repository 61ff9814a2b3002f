"""Steps of FSDP2 on many nodes: what one rank computes, gathers and reduces, from sizes alone.

A rank keeps a shard of each layer's parameters (fp32), of its gradient (fp32) and of Adam's two moments (fp32). Forward
and backward gather a layer's parameters in bf16, one layer ahead; backward computes a layer's forward again and reduces its
gradient in bf16 while the next layer computes. Layers keep their input alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.core.machine import Machine
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Queue, Trace, with_waits
from tieroff.units import NS_PER_S

GPUS_PER_NODE = 8
VOCABULARY = 128_256
_SHORT, _LONG = 2, 4
"""Bytes of an element in bf16 and in fp32."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder of equal layers with gated MLPs and grouped keys and values, as Llama's.

    Attributes:
        width, inner, keys: of a token between layers, inside the MLP, and of keys.
    """

    name: str
    layers: int
    width: int
    inner: int
    keys: int = 1024

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, without norms."""
        return 2 * self.width * (self.width + self.keys) + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        """All parameters: layers, embedding, head."""
        return self.layers * self.layer_parameters + 2 * VOCABULARY * self.width


MODELS = (Model("70 B", 80, 8_192, 28_672), Model("405 B", 126, 16_384, 53_248), Model("1 T", 128, 25_600, 83_200))


@dataclass(frozen=True, slots=True)
class Job:
    """A training step on a cluster: `sequences` of `length` tokens on each rank."""

    model: Model
    nodes: int
    sequences: int
    length: int = 4096

    @property
    def ranks(self) -> int:
        """GPUs; the degree of data parallelism."""
        return self.nodes * GPUS_PER_NODE

    @property
    def rank_tokens(self) -> int:
        """Tokens of one rank in a step."""
        return self.sequences * self.length


@dataclass(frozen=True, slots=True)
class _Unit:
    """What FSDP2 gathers at once, with its cost per rank and step."""

    name: str
    parameters: int
    forward_ns: int
    backward_ns: int
    forward_scratch: int
    backward_scratch: int


def exchange_ns(size_bytes: int, nodes: int, machine: Machine) -> int:
    """Returns the time to gather that many bytes on every rank, or to reduce as many to shards.

    A node takes in what others have over all its network cards together, and each GPU what the other seven of its node have
    or took in by the links inside; the slower of the two counts, and no start-up time.
    """
    outside, inside = machine.peer_rates(2)
    between = size_bytes * (nodes - 1) / nodes / (outside * GPUS_PER_NODE)
    within = size_bytes * (GPUS_PER_NODE - 1) / GPUS_PER_NODE / inside
    return round(max(between, within) * NS_PER_S)


def step_trace(job: Job, machine: Machine) -> Trace:
    """Returns the step of one rank, with communication beside compute."""
    return _Maker(job, machine).trace()


def _units(job: Job, machine: Machine) -> list[_Unit]:
    model, tokens = job.model, job.rank_tokens
    products = machine.bf16_flops_per_s * machine.clock["matmul_short"]
    attention = machine.bf16_flops_per_s * machine.clock["attention"]
    layer_s = 2 * model.layer_parameters * tokens / products + 2 * job.length * model.width * tokens / attention
    head = VOCABULARY * model.width
    head_s = 2 * head * tokens / products
    hidden = _SHORT * tokens * model.width
    logits = (_SHORT + _LONG) * tokens * VOCABULARY
    mlp = _SHORT * tokens * model.inner
    layers = [
        _Unit(f"layer {i}", model.layer_parameters, _ns(layer_s), _ns(3 * layer_s), 4 * hidden + 3 * mlp, 10 * hidden + 4 * mlp)
        for i in range(model.layers)
    ]
    return [
        _Unit("embedding", head, 0, 0, 0, 0),
        *layers,
        _Unit("head", head, _ns(head_s), _ns(2 * head_s), logits, 2 * logits),
    ]


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class _Maker:
    """Puts a step together: units in order, those of backward in reverse, each gathered one ahead."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job, self._machine = job, machine
        self._units = _units(job, machine)
        self._tensors: list[Tensor] = []
        self._ops: list[Op] = []
        kinds = ((TensorClass.PARAMETER, _LONG), (TensorClass.OPTIMIZER, 2 * _LONG))
        self._shards, self._states = (
            [self._add(f"{unit.name} {kind}", self._shard(unit) * size, kind, keep=True) for unit in self._units]
            for kind, size in kinds
        )
        self._gradients = [
            self._add(f"{unit.name} gradient", self._shard(unit) * _LONG, TensorClass.GRADIENT, owner=self._shards[i])
            for i, unit in enumerate(self._units)
        ]
        size = _SHORT * job.rank_tokens * job.model.width
        self._inputs = [self._add(f"{unit.name} input", size, TensorClass.ACTIVATION) for unit in self._units[1:]]

    def trace(self) -> Trace:
        """Returns the step."""
        count = len(self._units)
        self._pass(list(range(count)), "forward")
        self._pass(list(range(count - 1, -1, -1)), "backward")
        rate = self._machine.device_memory_bytes_per_s * self._machine.clock["memory"]
        for i, unit in enumerate(self._units):
            moved = (7 * _LONG) * self._shard(unit)  # reads parameter, gradient and both moments; writes all but the gradient
            reads, writes = (self._gradients[i], self._shards[i], self._states[i]), (self._shards[i], self._states[i])
            self._ops.append(Op(f"update {unit.name}", round(moved / rate * NS_PER_S), reads, writes, phase="optimizer"))
        name = f"{self._job.model.name} on {self._job.nodes} nodes, {self._job.sequences} x {self._job.length}"
        return Trace(with_waits(self._ops), tuple(self._tensors), name=name, origin="dry")

    def _pass(self, order: list[int], phase: str) -> None:
        whole = {order[0]: self._gather(order[0], phase)}
        for place, i in enumerate(order):
            for ahead in order[place + 1 : place + 2]:
                whole[ahead] = self._gather(ahead, phase)
            unit = self._units[i]
            if phase == "forward":
                reads = (whole[i], *self._inputs[max(i - 1, 0) : i])
                self._run(unit.name, unit.forward_ns, reads, tuple(self._inputs[i : i + 1]), unit.forward_scratch, phase)
                continue
            size = unit.parameters * _SHORT
            gradient = self._add(f"{unit.name} whole gradient", size, TensorClass.ACTIVATION)
            reads = (whole[i], *self._inputs[max(i - 1, 0) : i])
            self._run(f"{unit.name} backward", unit.backward_ns, reads, (gradient,), unit.backward_scratch, phase)
            self._exchange(f"reduce {unit.name}", size, (gradient,), (self._gradients[i],), phase)

    def _gather(self, i: int, phase: str) -> int:
        unit = self._units[i]
        size = unit.parameters * _SHORT
        whole = self._add(f"{unit.name} whole, {phase}", size, TensorClass.ACTIVATION)
        self._exchange(f"gather {unit.name}", size, (self._shards[i],), (whole,), phase)
        return whole

    def _exchange(self, name: str, size: int, reads: tuple[int, ...], writes: tuple[int, ...], phase: str) -> None:
        duration = exchange_ns(size, self._job.nodes, self._machine)
        self._ops.append(Op(name, duration, reads, writes, phase=phase, queue=Queue.COMMUNICATION))

    def _run(
        self, name: str, duration_ns: int, reads: tuple[int, ...], writes: tuple[int, ...], scratch: int, phase: str
    ) -> None:
        self._ops.append(Op(name, duration_ns, reads, writes, scratch, phase))

    def _shard(self, unit: _Unit) -> int:
        return -(-unit.parameters // self._job.ranks)

    def _add(self, name: str, size: int, kind: TensorClass, *, keep: bool = False, owner: int = -1) -> int:
        self._tensors.append(Tensor(name, size, kind, is_persistent=keep, owner=owner))
        return len(self._tensors) - 1
