"""Repair: from whatever state an exception left to one from which the next step is right.

[Note: what an exception leaves]
Ctrl-C and alarms raise between any two instructions, so a side effect may be done and the state that tells of it not yet
set. `finally` cannot help: it may be interrupted itself. Repair runs at the next moment that the engine has control, asks
what is really there (memory, addresses, transfers), and decides for the copy that is valid for certain:

| found                                   | what counts                                             |
|-----------------------------------------|---------------------------------------------------------|
| a copy in was under way                 | the copy below: what had arrived is dropped             |
| a copy out was under way, or had ended  | the device copy: what was written below counts as old   |
| no device copy, room below              | the copy below: the device copy was freed after it      |
| the tensor lies on its device copy      | the device copy: somebody may have written it           |
| the tensor lies on memory of others     | that memory                                             |
| a job of the host was to update it      | the copy below, once that has ended, if it was submitted|

Copies may also be under way that nobody has noted yet. They are waited for, since their memory may get other uses next.
"""

from __future__ import annotations

from collections.abc import Callable

from tieroff.core.tensor import allocated_bytes
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.offloaded import lies_on, restore_class, set_data
from tieroff.runtime.items.residency import BOTH, DEVICE, LOWER, ON_DEVICE
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.signal_safety import came_from_engine
from tieroff.runtime.tensors import view_of
from tieroff.storage.locks import let_go

_ENDING_TIMEOUT_S = 60.0


def is_torn(managed: ManagedModel) -> bool:
    """True when an exception passed through the engine since its last event, or a backward did not come to its end."""
    state, clock = managed.executor.state, managed.executor.clock
    if managed.executor.reads.depth or current_graph_task() != -1:
        return False  # in the middle of something
    return state.inside != 0 or clock.is_backward_open


def is_torn_by(managed: ManagedModel, error: BaseException) -> bool:
    """True where an exception left a pass without gradients between two lines of the engine: it is to be repaired at once.

    One of user code leaves all as it was, and a step that runs goes on.
    """
    executor = managed.executor
    if not executor.reads.depth and not came_from_engine(error):
        return False
    executor.state.inside += 1  # in a backward, whatever follows that repairs
    return current_graph_task() == -1


def interrupted(managed: ManagedModel, broke: Callable[[], None]) -> None:
    """An exception came between two lines of the engine that user code had called: `broke` repairs, or what follows does."""
    managed.executor.state.inside += 1
    if not managed.executor.reads.depth and current_graph_task() == -1:
        broke()


def repair(managed: ManagedModel) -> None:
    """Makes the engine's state one from which the next step is right; see [Note: what an exception leaves].

    Every tensor has a valid value afterwards, an update's parts are those that were done, and no step runs. It may be
    called at any time outside of a forward and a backward, and more than once.
    """
    executor = managed.executor
    executor.state.subclass_calls.restore()
    let_go(executor.state.lock)
    executor.shards.show()
    executor.shards.is_beginning = False
    for store in managed.stores.values():
        store.free_lock()
    managed.backend.settle(_ENDING_TIMEOUT_S)
    for store in managed.stores.values():
        store.repair()
    if managed.stepper is not None:
        managed.stepper.restore()
    items: list[Item] = [*executor.homes, *executor.activations]
    for item in items:
        _reconcile(item)
    traffic = executor.traffic
    traffic.device_bytes = sum(
        allocated_bytes(item.size_bytes, managed.backend.device.type) for item in items if item.device is not None
    )
    for home in list(executor.homes):
        if home.device is None and home.place is None:  # taken over in part: it lies where it always lay
            executor.homes.drop(home)
    executor.gradients.forget_reduction()
    executor.guard.repair()
    executor.activations.end_unused()
    executor.clock.is_backward_open = False
    executor.state.inside = 0
    executor.reads.depth = 0


def _reconcile(item: Item) -> None:
    _await(item)
    if isinstance(item, HomeItem) and _lies_elsewhere(item):
        _give_up(item)
        return
    is_there = item.device is not None and item.state in ON_DEVICE
    if not is_there and item.place is not None:
        _put_below(item)
    elif item.device is not None:
        _put_on_device(item)
    item.follow()


def _lies_elsewhere(item: HomeItem) -> bool:
    """True when the tensor lies on memory that is none of the engine's, whatever the item says of itself."""
    tensor, known = item.tensor, (item.device, item.value, item.lower, item.placeholder)
    return tensor is not None and not any(memory is not None and lies_on(tensor, memory) for memory in known)


def _give_up(item: HomeItem) -> None:
    """Somebody gave the tensor other memory, which is its own: it is taken over when the next step begins."""
    item.leaving = item.arriving = item.updating = item.device = item.value = None
    if isinstance(item, GradientItem):
        item.waiting = None
    item.is_lifted, item.state = False, LOWER if item.place is not None else DEVICE


def _await(item: Item) -> None:
    for arrival in (item.leaving, item.arriving, item.updating):
        if arrival is not None:
            arrival.wait(_ENDING_TIMEOUT_S)


def _put_below(item: Item) -> None:
    """The copy below counts."""
    item.leaving = item.arriving = item.updating = None
    if isinstance(item, HomeItem):
        item.is_lifted = item.is_shown_below or _is_up(item)
        item.before_free()  # gives the tensor its place below, or makes it offloaded
    item.device, item.state = None, LOWER


def _put_on_device(item: Item) -> None:
    """The device copy counts; a copy below does too where none was on its way and nobody could write since."""
    device, was_both = item.device, item.state is BOTH and item.leaving is None
    assert device is not None
    item.leaving = item.arriving = None
    if not isinstance(item, HomeItem):
        item.state = BOTH if was_both else DEVICE
        return
    if item.value is None:
        item.value = view_of(device, item.dtype, item.size, item.stride, 0)
    item.is_lifted = _is_up(item)
    if not item.is_lifted and not item.is_shown_below:
        item.value_version = item.value._version  # nobody reaches it: it is as it came, whether or not that was noted
    item.state = BOTH if was_both and not item.is_lifted else DEVICE
    tensor = item.tensor
    if not item.is_lifted and item.state is DEVICE and tensor is not None:
        set_data(tensor, item.value)
        restore_class(item)
        item.is_lifted = True


def _is_up(item: HomeItem) -> bool:
    """True when the tensor does not lie where it lies while its bytes are below; others gave it that memory, or the engine."""
    tensor = item.tensor
    if tensor is None or item.device is None:
        return False
    return lies_on(tensor, item.device) or not (item.lower is None or not item.is_shown_below or lies_on(tensor, item.lower))
