"""Which node of an execution trace a profiler's call is: the two may be two runs of one program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tieroff.errors import CaptureError
from tieroff.study.profiles.execution_trace import Node
from tieroff.study.profiles.kineto import Call, Profile


def match(profile: Profile, nodes: Sequence[Node], where: str) -> dict[Call, Node]:
    """Returns the node of every call that the execution trace has, by record-function number, else by order.

    Args:
        profile: what the profiler saw.
        nodes: of the execution trace.
        where: the execution trace's file, for messages.

    Raises:
        CaptureError: a call and its node have different names, or a call that gave the GPU work has no node: the two are
            not of one program.
    """
    operators = [node for node in nodes if node.is_operator]
    is_numbered = all(call.record_id >= 0 for call in profile.calls)
    found = _by_number(profile, operators, where) if is_numbered else _by_order(profile, operators, where)
    missing = [call for call in profile.calls if call.work and call not in found]
    if missing:
        raise CaptureError(
            f"{where}: expected an execution trace of the program in {profile.path}, but {len(missing)} operators that gave "
            f"the GPU work are not in it, {missing[0].name} (record function {missing[0].record_id}) first: record both in "
            "one run, with tieroff.tracing.profile"
        )
    return found


def _by_number(profile: Profile, operators: list[Node], where: str) -> dict[Call, Node]:
    by_number = {node.record_id: node for node in operators}
    found: dict[Call, Node] = {}
    for call in profile.calls:
        node = by_number.get(call.record_id)
        if node is None:
            continue
        if node.name != call.name:
            raise _other_program(profile, where, f"record function {call.record_id}", call.name, node.name)
        found[call] = node
    return found


def _by_order(profile: Profile, operators: list[Node], where: str) -> dict[Call, Node]:
    """Pairs each thread of the profile with a thread of the trace that called the same operators in the same order."""
    known = {node.name for node in operators}
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(profile.calls, key=lambda call: call.number):
        if call.name in known or call.work:  # the profiler's own ranges are in no execution trace
            calls[call.thread].append(call)
    threads: dict[int, list[Node]] = defaultdict(list)
    for node in operators:
        threads[node.thread].append(node)
    found: dict[Call, Node] = {}
    for sequence in calls.values():
        names = [call.name for call in sequence]
        thread = next((t for t, own in threads.items() if [node.name for node in own] == names), None)
        if thread is None:
            raise _no_such_thread(profile, where, sequence, threads)
        found.update(zip(sequence, threads.pop(thread), strict=True))
    return found


def _no_such_thread(profile: Profile, where: str, calls: list[Call], threads: dict[int, list[Node]]) -> CaptureError:
    """Returns the error that names where the thread that is most alike goes apart."""

    def alike(nodes: list[Node]) -> int:
        pairs = zip(calls, nodes, strict=False)
        return next((i for i, (call, node) in enumerate(pairs) if call.name != node.name), min(len(calls), len(nodes)))

    nearest = max(threads.values(), key=alike, default=[])
    position = alike(nearest)
    names = [sequence[position].name if position < len(sequence) else "nothing more" for sequence in (calls, nearest)]
    return _other_program(profile, where, f"operator {position} of thread {calls[0].thread}", *names)


def _other_program(profile: Profile, where: str, at: str, expected: str, got: str) -> CaptureError:
    return CaptureError(
        f"{where}: expected an execution trace of the program in {profile.path}, but {at} is {expected} there and {got} here: "
        "record both in one run, with tieroff.tracing.profile"
    )
