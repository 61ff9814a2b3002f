"""Problems in the format of the contest on intra-operator parallelism (IOPDDL, ASPLOS 2025), plain or compressed by gzip.

Per node an interval, and per strategy a cost and a usage; per edge two nodes and a matrix of costs by row; one limit.
"""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tieroff.errors import ConfigError
from tieroff.study.sharding.problem import Integers, ShardingProblem


def load_problem(path: str | Path) -> ShardingProblem:
    """Returns the problem that a .json or .json.gz file describes.

    Raises:
        ConfigError: the file cannot be read, or is no such problem.
    """
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        return parse_problem(json.loads(text)["problem"])
    except KeyError as error:
        raise ConfigError(f"{path}: expected a problem in the contest's format, but the key {error} is missing") from error
    except (OSError, EOFError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: expected a problem in the contest's format, but {error}") from error


def parse_problem(document: dict[str, Any]) -> ShardingProblem:
    """Returns the problem in a document's "problem".

    Raises:
        ConfigError: lists of edges, costs or usages that do not fit.
        KeyError, ValueError, TypeError, OverflowError: no such document.
    """
    nodes, edges = document["nodes"], document["edges"]
    intervals = np.array(nodes["intervals"], np.int64).reshape(-1, 2)
    ends = np.array(edges["nodes"], np.int64).reshape(-1, 2)
    sizes = [len(costs) for costs in nodes["costs"]]
    if sizes != [len(usages) for usages in nodes["usages"]]:
        raise ValueError("the lists of costs and usages differ in length")
    return ShardingProblem(
        name=str(document.get("name", "")),
        first_strategy=_starts(sizes),
        cost=_flat(nodes["costs"]),
        usage=_flat(nodes["usages"]),
        start=np.ascontiguousarray(intervals[:, 0]),
        stop=np.ascontiguousarray(intervals[:, 1]),
        source=np.ascontiguousarray(ends[:, 0]),
        target=np.ascontiguousarray(ends[:, 1]),
        first_entry=_starts([len(costs) for costs in edges["costs"]]),
        entry=_flat(edges["costs"]),
        usage_limit=int(document["usage_limit"]),
    )


def _starts(lengths: list[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _flat(lists: list[list[int]]) -> Integers:
    return np.fromiter(chain.from_iterable(lists), np.int64)
