"""Records one real step: every aten op of forward, backward and update, folded into the intervals between ticks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError, RecorderBusyError
from tieroff.parts import is_wrapper, parts_of
from tieroff.tracing.recording.apart import Apart
from tieroff.tracing.recording.arguments import Arguments, is_view, tensors_in
from tieroff.tracing.recording.between import PLAIN, Between
from tieroff.tracing.recording.life import End, Life, Losses, UserCalls, is_of_parameter, tensor_of, transient_bytes, uses_of
from tieroff.tracing.recording.makers import Makers
from tieroff.tracing.recording.scratch import are_large, peak_counter, takes_new
from tieroff.tracing.recording.stack import put_on, stay_on, take_off
from tieroff.tracing.recording.unseen import Unseen
from tieroff.uncompiled import uncompiled

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of a backward
_TURNS = 2  # steps of other models that wait for the end of one that is traced
Tell = Callable[[Trace | None], None]


class StepRecorder(TorchDispatchMode):
    """A dispatch mode that follows every storage of one device through a step.

    It is pushed when the step's first forward begins and popped when the update is over, so that backward and the user's own
    code between are seen. Not seen: `p.data = t` and writes through NumPy. Scratch memory inside one kernel shows by
    a peak counter (scratch.py).

    [Note: what an op costs] The same, however much is alive: a storage that dies says so itself. After a backward, until the
    next forward, backward or update begins, user code runs that may use gradients or parameters, or may load the next batch.
    An op there that uses nothing which the step knows is not the step's: of what it makes only the time of birth is noted,
    and what was beside it, in case a later op of the step uses it.

    Args:
        device: whose storages are followed.
        tell: called with the trace as soon as there is one, or with None when there will be none of this step.
        apart: measures what the program has there apart from the step; None: nobody asks.

    Attributes:
        is_on: it watches; not before the step's forward, nor after its update.
        is_cut: another model's step had waited too long.
    """

    def __init__(self, device: torch.device, tell: Tell | None = None, apart: Apart | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell, self._apart = tell, apart or Apart(device)
        self._device_type = device.type
        self._lives: list[Life] = []
        self._dead: deque[End] = deque()  # since the last sweep; other threads append too
        self._alive: dict[int, End] = {}
        self._resized: dict[int, tuple[torch.UntypedStorage, Life]] = {}  # these end when their memory is freed
        self._by_key: dict[Hashable, list[Life]] = {}
        self._deaths: dict[Hashable, int] = {}
        self._events, self._first_instant = list[tuple[str, str]](), list[int]()
        self._now, self._op = 0, -1  # the instant, and the op of the trace that runs
        self.is_on, self.is_cut, self._is_inside, self._waiting = False, False, False, 0
        self._counter = peak_counter(device)
        self._unseen, self._scratch = Unseen(self._counter), dict[int, int]()
        self._between = Between(self._scratch)  # see [Note: what an op costs]
        self._user_calls, self._losses, self._makers = UserCalls(device.type), Losses(), Makers()
        self.meta = {"torch": str(torch.__version__)}
        self._used: Callable[[Any, bool], None] | None = None
        self._written_in_backward, self._arguments = frozenset[Hashable](), Arguments()

    # Those of torch's control flow (cond, scan) and of what it compiled: each is one op, of which the insides are not seen.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile while a step is traced: code that it meets then and skips would stay uncompiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # ours does it; see [Note: dynamo only where it is]

    def follow(self, used: Callable[[Any, bool], None]) -> None:
        self._used = used

    # -- life cycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Pushes the mode.

        Raises:
            CaptureError: another dispatch mode is active, whose end in between would pop this one.
            RecorderBusyError: that one traces the step of another model.
        """
        for other in _python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(other, StepRecorder):
                other.give_way()
        others = _python_dispatch._get_current_dispatch_mode_stack()
        if others:
            if self._tell is not None:
                self._tell(None)
            if isinstance(others[-1], StepRecorder):
                raise RecorderBusyError("another wrapped model's step is traced just now; this one's turn comes later")
            raise CaptureError(
                f"cannot trace a step inside another TorchDispatchMode ({type(others[-1]).__name__}); "
                "run one training step outside of it first"
            )
        put_on(self)
        self.is_on, self._is_inside = True, _graph_task() != -1
        self._apart.begin()

    def stop(self) -> None:
        """Takes the mode off the stack; deaths are still followed."""
        was_on, self.is_on = self.is_on, False
        take_off(self)  # also one that was stopped where the stack was another: in a backward that broke off
        if not was_on:
            return
        self._sweep()
        self.meta |= self._apart.end(self._lives)

    def give_way(self) -> None:
        """Another model's step was to be traced. A step that does not end, as after an exception, is given up."""
        self._waiting += 1
        if self._waiting > _TURNS or not self.is_on:
            self.is_cut = True
            self.stop()

    # -- events from the runtime ----------------------------------------------------------------------------------

    def event(self, name: str, phase: str) -> None:
        if self._is_inside and self.is_on:
            stay_on(self)  # see [Note: a step that begins in backward] in stack.py
        self._sweep()
        self._between.event(phase, self._now)
        was_unseen = self._unseen.is_running
        self.end_unseen()  # memory taken so far belongs to the op that ends; memory fetched now is known
        self._losses.event(phase, self._now)
        self._events.append((name, phase))
        self._op = len(self._events) - 1
        self._now += 1
        self._first_instant.append(self._now)
        if was_unseen:
            self._unseen.pass_event(self._now, self._op)

    def bind(self, storage: object, key: Hashable, is_below: bool = False, is_new: bool = False, is_set: bool = False) -> None:
        assert isinstance(storage, torch.UntypedStorage)
        life, is_fresh = self._life_of(storage)
        if is_new and self._unseen.is_running:
            self._unseen.came(life)
        if is_fresh and self._unseen.makes_first and not (is_new or is_below):
            life.birth, life.birth_op = self._unseen.since
        if is_set and not (is_fresh or life.keys):
            self._lives.append(self._user_calls.given(life, self._now, max(self._op, 0)))
        if (is_new or is_below) and not life.keys:
            life.birth, life.birth_op = self._now, max(self._op, 0)
            life.is_copy = True
            life.reads.clear()  # reads so far belong to the engine's making it
            life.writes.clear()
        if key not in life.keys:
            life.keys[key] = max(self._op, 0)
            self._by_key.setdefault(key, []).append(life)
        life.is_below = is_below

    def disown(self, storage: object) -> None:
        assert isinstance(storage, torch.UntypedStorage)
        life = self._life_of(storage)[0]
        life.is_below |= not life.keys

    def resizes(self, storage: object) -> None:
        assert isinstance(storage, torch.UntypedStorage)
        self._resized[storage._cdata] = storage, self._life_of(storage)[0]

    def made(self, storages: Iterable[object]) -> None:
        # Before the sweep: nobody knows when between the update and now other storages died, so they count beside these.
        for storage in self._followed(storages):
            life, is_new = self._life_of(storage)
            life.is_next |= is_new
        self._now += 1

    def given(self, storages: Iterable[object]) -> None:
        for storage in self._followed(storages):
            self._life_of(storage)
        self._now += 1

    def returned(self, storages: Iterable[object], behind: Iterable[object] = ()) -> None:
        for storage in self._followed(storages):
            self._life_of(storage)[0].named = self._now
        self._losses.lives += [self._life_of(storage)[0] for storage in self._followed(behind)]

    def stands(self, storages: Iterable[object]) -> None:
        for storage in self._followed(storages):
            life = self._life_of(storage)[0]
            life.birth, life.is_foreign = 0, False

    def read(self, key: Hashable) -> None:
        found = next((life for life in reversed(self._by_key.get(key, ())) if not life.is_below), None)
        if found is not None:
            found.reads.add(max(self._op, 0))

    def wrote(self, key: Hashable) -> None:
        found = next((life for life in reversed(self._by_key.get(key, ())) if not life.is_below), None)
        if found is not None:
            found.writes.add(max(self._op, 0))

    def begin_unseen(self, given: Iterable[object] = (), *, makes_first: bool = False) -> None:
        for storage in self._followed(given):
            self._was_there(storage).reads.add(max(self._op, 0))
        self._unseen.begin(self._now, self._op, makes_first=makes_first)

    def end_unseen(self, made: Iterable[object] = ()) -> None:
        if not self._unseen.is_running:
            return
        self._sweep()  # what the code freed shows in the peak that it had
        self._now += 1
        for storage in self._followed(made):
            self._was_there(storage)
        scratch_bytes = self._unseen.end()
        if scratch_bytes is not None:
            self._scratch[self._now] = scratch_bytes

    def begin_user_call(self, kept: Mapping[Hashable, int]) -> None:
        self._user_calls.begin(self._now, kept)

    def end_user_call(self) -> None:
        self._user_calls.end(self._now)

    @property
    def beside(self) -> Mapping[int, int]:
        return self._user_calls.most_bytes

    def died(self, key: Hashable) -> None:
        self._deaths[key] = self._op

    # -- events from torch ----------------------------------------------------------------------------------------

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return self._arguments.call(func, args, kwargs)
        if self._dead or self._resized:
            self._sweep()  # what died since the last op is not there while this one runs
        self._makers.running = func
        inputs = self._arguments.of(func, args, kwargs)
        if self._between.is_now:
            self._between.look(inputs)
            if not any(self._knows(tensor) for tensor, _ in inputs):
                return self._run_beside(func, args, kwargs, inputs)
        for tensor, is_written in inputs:
            self._use(tensor, is_written)
        out = self._run(func, args, kwargs, inputs)
        for leaf in (out,) if isinstance(out, torch.Tensor) else tensors_in((out,)):
            self._use(leaf, True, is_output=True)
        if self._dead:
            self._sweep()
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[tuple[torch.Tensor, bool]]) -> Any:
        """Runs an op, and notes the scratch memory that it took at the instant it ends."""
        counter = self._counter
        if counter is None or self._unseen.is_running or is_view(func) or not are_large(inputs, counter.from_bytes):
            out = self._arguments.call(func, args, kwargs)
            self._now += 1
            return out
        counter.start()
        out = self._arguments.call(func, args, kwargs)
        self._now += 1
        self._scratch[self._now] = taken = counter.stop()
        self._makers.note(self._op, taken, None, self._events)
        return out

    def _run_beside(self, func: Any, args: Any, kwargs: Any, inputs: list[tuple[torch.Tensor, bool]]) -> Any:
        """Runs an op that is not the step's."""
        out = self._arguments.call(func, args, kwargs)
        self._now += 1
        for leaf in tensors_in((out,)):
            if type(leaf) in PLAIN and leaf.layout is torch.strided:
                self._between.note(leaf.untyped_storage(), (self._now, max(self._op, 0)), inputs)
        return out

    def _knows(self, tensor: torch.Tensor) -> bool:
        """Returns whether the step has seen this tensor's storage, or has to look closer."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return True
        return tensor.untyped_storage()._cdata in self._alive

    def _use(self, tensor: torch.Tensor, is_written: bool, is_output: bool = False) -> None:
        if type(tensor) not in PLAIN and is_wrapper(tensor):
            for _, part in parts_of(tensor):
                self._use(part, is_written, is_output)
            return
        if tensor.layout is not torch.strided:
            return
        if tensor.device.type != self._device_type:
            if is_written and tensor.device.type == "cpu":
                self._write_below(tensor)
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a wrapper without a storage of its own: its inner tensors are seen by themselves
        self._use_storage(tensor, storage, is_written, is_output)

    def _use_storage(self, tensor: torch.Tensor, storage: torch.UntypedStorage, is_written: bool, is_output: bool) -> None:
        """Notes the use of a tensor on the device that is followed."""
        is_new = (end := self._alive.get(storage._cdata)) is None or end() is None
        is_there = is_new and not is_output and not takes_new(self._makers.running)
        life = self._was_there(storage) if is_there else self._life_of(storage)[0]
        life.is_foreign |= is_there and is_of_parameter(tensor)
        life.size_bytes = max(life.size_bytes, storage.nbytes())  # resized in place: the larger size counts for its whole life
        if is_output and not is_new:
            return  # a view of a known storage, or an in-place write, which its argument shows
        if is_output:
            self._makers.note(self._op, life.size_bytes, life.keys, self._events)
        if self._used is not None and life.keys and not is_output:
            self._used(tensor, is_written)
        (life.writes if is_written else life.reads).add(self._op if self._op > 0 else 0)

    def _was_there(self, storage: torch.UntypedStorage) -> Life:
        """Returns the life of a storage that no op was seen to make.

        First seen now, it was there before the step, or came in the midst of it, or code that is not watched has made it.
        """
        life, is_new = self._life_of(storage)
        if is_new:
            life.birth, life.birth_op = self._between.birth_of(storage) or self._unseen.birth_at(self._now, self._op)
        return life

    def _followed(self, storages: Iterable[object]) -> Iterator[torch.UntypedStorage]:
        for storage in storages:
            assert isinstance(storage, torch.UntypedStorage)
            if storage.device.type == self._device_type:
                yield storage

    def _write_below(self, tensor: torch.Tensor) -> None:
        """Notes a write on the host, if it is one to a home that lies there."""
        end = self._alive.get(tensor.untyped_storage()._cdata)
        if end is not None and end.life.is_below:
            end.life.writes.add(max(self._op, 0))

    def _life_of(self, storage: torch.UntypedStorage) -> tuple[Life, bool]:
        """Returns the life of a storage and whether it begins now."""
        key = storage._cdata
        end = self._alive.get(key)
        if end is not None and end() is not None:
            return end.life, False
        if end is not None:
            self._bury(end)
        end = End.of(storage, Life(storage, self._now, max(self._op, 0)), self._dead.append)
        # A signal handler may run ops between any two lines here: a storage has the life that came first.
        first = self._alive.setdefault(key, end)
        if first is end:
            self._lives.append(end.life)
        return first.life, first is end

    def _bury(self, end: End) -> None:
        if self._alive.get(end.key) is end:  # else another storage has its place by now
            end.life.death, end.life.death_op = self._now, max(self._op, 0)
            self._unseen.went(end.life)
            del self._alive[end.key]

    def _sweep(self) -> None:
        for key, (storage, life) in self._resized.items():
            if not storage.nbytes() and life.death < 0:
                self._bury(self._alive[key])
            elif storage.nbytes() and life.death >= 0:
                self._resized[key] = storage, self._life_of(storage)[0]
        while self._dead:
            try:
                end = self._dead.popleft()
            except IndexError:  # a signal handler's op swept between these two lines
                break
            self._bury(end)

    # -- the trace -----------------------------------------------------------------------------------------------

    @property
    def written_below(self) -> frozenset[Hashable]:
        """The keys of subjects whose bytes below forward or backward wrote: user code did, past the engine."""
        passes = {op for op, (_, phase) in enumerate(self._events) if phase in ("forward", "backward")}
        return frozenset(key for life in self._lives if life.is_below and life.writes & passes for key in life.keys)

    @property
    def written_in_backward(self) -> frozenset[Hashable]:
        return self._written_in_backward

    def backward_ended(self) -> None:
        self._written_in_backward |= self.written_below
        self._between.begin(self._alive.values(), self._now)

    def watch_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._between.gradients = gradients

    @property
    def used_gradients(self) -> bool:
        return self._between.used_gradients

    @property
    def foreign_bytes(self) -> int:
        return sum(life.size_bytes for life in self._lives if life.is_foreign and not (life.keys or life.is_below))

    @property
    def scratch_bytes(self) -> int:
        return max(self._scratch.values(), default=0)

    def used_below(self, op: int) -> dict[Hashable, bool]:
        used = (life for life in self._lives if life.is_below and op in life.reads | life.writes)
        return {key: op in life.writes for life in used for key in life.keys}

    def written(self, keys: set[Hashable]) -> set[Hashable]:
        return {key for life in self._lives if life.writes and not life.is_below for key in life.keys if key in keys}

    def finish(self, subjects: list[Subject], durations_ns: list[int], name: str) -> Trace:
        self.stop()
        self._sweep()
        count, index = len(self._events), {subject.key: i for i, subject in enumerate(subjects)}
        lives = [life for life in self._lives if not life.is_below]
        holds, reads, writes = uses_of(lives, index, self._deaths, count, self._held)
        ends = self._first_instant, self._now
        activations = {subject.key: subject.kind is TensorClass.ACTIVATION for subject in subjects}
        transient = transient_bytes(lives, activations, ends, self._scratch, self._device_type, self._user_calls)
        ops = tuple(
            Op(
                name=self._events[i][0],
                duration_ns=durations_ns[i],
                reads=tuple(sorted(reads[i])),
                writes=tuple(sorted(writes[i])),
                transient_bytes=transient[i],
                phase=self._events[i][1],
                made_by=self._makers.words(i, index),
            )
            for i in range(count)
        )
        tensors = tuple(
            tensor_of(s, index, holds[i], self._deaths.get(s.key, count), count, self._device_type)
            for i, s in enumerate(subjects)
        )
        trace = Trace(ops, tensors, name=name, origin="step", meta={**self.meta, **self._user_calls.meta(index)})
        if self._tell is not None:
            self._tell(trace)
        return trace

    def _held(self, life: Life, count: int) -> list[tuple[int, int]]:
        """Returns the op intervals in which the program itself keeps a storage on the device."""
        return life.held(count)
