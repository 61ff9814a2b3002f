"""`swapadvisor`: SwapAdvisor, a genetic search over memory allocation and swaps (Huang et al., ASPLOS 2020).

What is known comes from notes on the paper, not from its code: the structure is theirs, all numbers are defaults, not
verified.

Rule. The device's memory is a pool of objects in size classes. An individual says which tensor sizes share a class (each
class as large as its largest tensor) and how many objects every class has, within the budget. The swaps follow from it:
the ops are walked in order, and a tensor that is needed takes a free object of its class, else the one of the resident
tensor of that class that is idle and needed again furthest in the future. A first walk begins with an empty device and
shows what persistent tensors find an object before anything has to go: these are resident when the second walk begins,
and again when it ends. A copy out begins right after the last use before the eviction; the copy in that is to have the
object begins as soon as the object is free, but never before that of a tensor that is needed earlier.
The fitness of an individual is its simulated step time; parents are drawn with softmax(-time), children cross both
vectors at one point of the sizes in order, change at random and are repaired to fit the budget.

Where the port differs. The order of the ops, which the paper searches too, is fixed: plans keep the trace's, since an
eager program runs as it is written. What cannot move is not pooled; its largest sum is kept aside. Plans count bytes:
classes limit what is planned, not what is charged. What is clean is dropped free. Where the executor crosses no step's
end, a persistent tensor that moves at all is away there. The search ends after `POPULATION` individuals and
`GENERATIONS` more rounds, fewer on large traces, with a fixed seed; the best so far is the result (the paper searches for
half an hour and more). Where the host is full the drive follows, or the tensor stays.

On the ten ops of tests/golden/ten_ops.py. The fastest individual found lets m and n, which are needed furthest in the
future, give their objects up in A, a and n in B. (tests/unit/policies/test_policies_search.py works the swaps of one individual
out.)
* swapadvisor: A `m<h 6-8, m>h 9-10, n<h 7-9, n>h 10-10`; B `a>h 2-2, a<h 6-7, n<h 7-9, n>h 10-10`
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import Assumptions, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.shared.classes import Classes, Pool

log = logging.getLogger("tieroff")

POPULATION = 16
GENERATIONS = 6
MUTATION = 0.2  # chance that a gene is drawn again
SOFTMAX_SHARE = 0.05  # of the best time: what softmax takes as one unit
_WORK = 150_000  # ops and units looked at, all individuals together: some seconds of planning
_INDIVIDUALS_AT_LEAST = 8
_SEED = 0


@policy("swapadvisor", paper="Huang et al., ASPLOS 2020", published=True, assumes=Assumptions(reorders=True))
def plan_swapadvisor(problem: Problem) -> Plan:
    """Returns the plan of the best individual found."""
    if problem.fits or not problem.units:
        return build_plan(problem, "swapadvisor", [], {})
    pool = Pool(problem)
    generator = random.Random(_SEED)
    size = len(pool.sizes)
    count = _WORK // (problem.op_count + len(problem.units) + 1)
    count = max(_INDIVIDUALS_AT_LEAST, min(POPULATION * (1 + GENERATIONS), count))
    population = min(POPULATION, max(4, count // 3))
    whole = POPULATION * (1 + GENERATIONS)
    if count < whole:
        log.info("swapadvisor: a search of %d individuals instead of %d; its best is taken", count, whole)
    scored: list[_Scored] = []
    seen: set[Classes] = set()
    for index in range(count):
        if index < population:
            genes = _first_genes(index, size, generator)
        else:
            scored = sorted(scored, key=lambda s: s.key)[:population]
            genes = _mutated(_crossed(*_parents(scored, generator), generator), generator)
        classes = pool.classes(genes.is_top, genes.wants)
        if classes in seen:
            continue
        seen.add(classes)
        plan = pool.plan("swapadvisor", classes)
        over = max(0, plan.peak_bytes[Tier.DEVICE] - problem.device_bytes)
        scored.append(_Scored((over, simulate(plan, problem.trace, problem.machine).step_ns), genes, plan))
    return min(scored, key=lambda s: s.key).plan


@dataclass(frozen=True, slots=True)
class _Genes:
    """Per tensor size in ascending order: whether a class ends with it, and how much it wants more objects."""

    is_top: tuple[bool, ...]
    wants: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Scored:
    key: tuple[int, int]
    genes: _Genes
    plan: Plan


def _first_genes(index: int, size: int, generator: random.Random) -> _Genes:
    if index == 0:
        return _Genes((True,) * size, (1.0,) * size)
    if index == 1:
        return _Genes((False,) * size, (1.0,) * size)
    return _mutated(_Genes(tuple(generator.random() < 0.7 for _ in range(size)), (1.0,) * size), generator)


def _parents(scored: list[_Scored], generator: random.Random) -> tuple[_Genes, _Genes]:
    best = scored[0].key[1]
    unit = max(1.0, SOFTMAX_SHARE * best)
    is_within = scored[0].key[0]
    weights = [math.exp(max(-50.0, (best - s.key[1]) / unit)) if s.key[0] <= is_within else 1e-9 for s in scored]
    first, second = generator.choices(scored, weights, k=2)
    return first.genes, second.genes


def _crossed(first: _Genes, second: _Genes, generator: random.Random) -> _Genes:
    cut = generator.randint(0, len(first.wants))
    return _Genes(first.is_top[:cut] + second.is_top[cut:], first.wants[:cut] + second.wants[cut:])


def _mutated(genes: _Genes, generator: random.Random) -> _Genes:
    return _Genes(
        tuple(value != (generator.random() < MUTATION) for value in genes.is_top),
        tuple(w * 2.0 ** generator.uniform(-2, 2) if generator.random() < MUTATION else w for w in genes.wants),
    )
