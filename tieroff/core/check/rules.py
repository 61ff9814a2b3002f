"""What a plan must hold, rule by rule.

[Note: rules]
| rule | a plan is refused when |
|---|---|
| digest | it is for another trace, or another number of ops |
| range | an index, a tick, an interval or a range of bytes is out of range, or tiers of a transfer make no sense |
| capability | the executor cannot do it: tier, wrap, host to NVMe, repeat, update on the host, part, size, movable, gradient |
| rank | ranks of a link are no permutation, or do not follow the order of issue |
| repeat | a repeat is out of order, writes what it must not, or its inputs are not those that its first run read |
| host_update | an update on the host is out of order, lacks valid data in HOST, or an op touches the data meanwhile |
| overlap | two residencies of the same bytes in one tier share an op |
| required | bytes are nowhere, or an op or a hold requires bytes that are not on the device |
| source | the source of a transfer is not resident from `issue_at` until the transfer is awaited |
| target | the target of a transfer is not resident from `issue_at` on |
| from_nowhere | a residency is filled neither by the tensor's birth nor by a transfer or a repeat |
| not_ready | an op uses bytes whose load is not awaited yet |
| stale_copy | the source of a copy, or its target, is written while it is under way |
| invalid_copy | a transfer reads a tier that has no valid copy |
| lost_data | the last valid copy is dropped though it is needed before a repeat brings it back |
| address | addresses are missing, or two residencies share an op and an address |
| budget | bytes at an op exceed a tier's budget |
| peak | `peak_bytes` is not what the residencies add up to |
"""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from tieroff.errors import InvalidPlanError


class Rule(StrEnum):
    """The rules of [Note: rules], roughly in the order in which they are checked."""

    DIGEST = "digest"
    RANGE = "range"
    CAPABILITY = "capability"
    RANK = "rank"
    REPEAT = "repeat"
    HOST_UPDATE = "host_update"
    OVERLAP = "overlap"
    REQUIRED = "required"
    SOURCE = "source"
    TARGET = "target"
    FROM_NOWHERE = "from_nowhere"
    NOT_READY = "not_ready"
    STALE_COPY = "stale_copy"
    INVALID_COPY = "invalid_copy"
    LOST_DATA = "lost_data"
    ADDRESS = "address"
    BUDGET = "budget"
    PEAK = "peak"


def refuse(rule: Rule, message: str) -> NoReturn:
    """Raises the error of a broken rule.

    Raises:
        InvalidPlanError: always; `rule` is the rule's name.
    """
    raise InvalidPlanError(f"{rule.value}: {message}", rule=rule.value)
