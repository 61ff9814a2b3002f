"""The policies by name. A policy takes a Problem and returns a Plan.

To add one: a file beside this one with a function of that kind, and a line in POLICIES. A file whose policies decide
while the step runs, or were published for other memory and links than the common model's, says so in a `DECLARATION`
(tieroff/planner/policies/declaration.py); one without it is static and has no options of its own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from tieroff.core.plan import Plan
from tieroff.errors import ConfigError
from tieroff.planner.problem.problem import Problem

if TYPE_CHECKING:
    from tieroff.planner.policies.declaration import Declaration

Policy = Callable[[Problem], Plan]

POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "auto": "tieroff.planner.auto.portfolio:plan_auto",
        "autoswap": "tieroff.planner.policies.search.autoswap:plan_autoswap",
        "autoswap-aoa": "tieroff.planner.policies.search.autoswap:plan_autoswap_aoa",
        "autoswap-doa": "tieroff.planner.policies.search.autoswap:plan_autoswap_doa",
        "autoswap-swdoa": "tieroff.planner.policies.search.autoswap:plan_autoswap_swdoa",
        "autoswap-wdoa": "tieroff.planner.policies.search.autoswap:plan_autoswap_wdoa",
        "autotm-static": "tieroff.planner.policies.search.autotm:plan_autotm_static",
        "autotm-sync": "tieroff.planner.policies.search.autotm:plan_autotm_sync",
        "capuchin": "tieroff.planner.policies.activations.capuchin:plan_capuchin",
        "deepum": "tieroff.planner.policies.online.deepum:plan_deepum",
        "demand": "tieroff.planner.policies.online.demand:plan_demand",
        "dragon": "tieroff.planner.policies.online.dragon:plan_dragon",
        "flashneuron": "tieroff.planner.policies.activations.flashneuron:plan_flashneuron",
        "floor": "tieroff.planner.auto.floor:plan_floor",
        "floor_mixed": "tieroff.planner.auto.floor:plan_floor_mixed",
        "g10": "tieroff.planner.policies.tiers.g10:plan_g10",
        "greedy": "tieroff.planner.auto.greedy:plan_greedy",
        "lms": "tieroff.planner.policies.activations.lms:plan_lms",
        "mlp-offload": "tieroff.planner.policies.tiers.mlp_offload:plan_mlp_offload",
        "oc-dnn": "tieroff.planner.policies.activations.oc_dnn:plan_oc_dnn",
        "relaxed": "tieroff.planner.auto.relaxed:plan_relaxed",
        "sentinel": "tieroff.planner.policies.online.sentinel:plan_sentinel",
        "ssdtrain": "tieroff.planner.policies.activations.ssdtrain:plan_ssdtrain",
        "superneurons": "tieroff.planner.policies.activations.superneurons:plan_superneurons",
        "swapadvisor": "tieroff.planner.policies.search.swapadvisor:plan_swapadvisor",
        "teraio": "tieroff.planner.policies.tiers.teraio:plan_teraio",
        "tflms": "tieroff.planner.policies.activations.tflms:plan_tflms",
        "vdnn-all": "tieroff.planner.policies.activations.vdnn:plan_vdnn_all",
        "vdnn-conv": "tieroff.planner.policies.activations.vdnn:plan_vdnn_conv",
        "vdnn-dyn": "tieroff.planner.policies.activations.vdnn:plan_vdnn_dyn",
        "zero-infinity": "tieroff.planner.policies.tiers.zero:plan_zero_infinity",
        "zero-offload": "tieroff.planner.policies.tiers.zero:plan_zero_offload",
    }
)
"""Name -> "module:function"; a policy's module is loaded when it is asked for."""


OWN = frozenset({"auto", "floor", "floor_mixed", "greedy", "relaxed"})
"""Those that no one published: this project's."""


def find_policy(name: str) -> Policy:
    """Returns the policy of a name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    policy: Policy = getattr(_module(name), POLICIES[name].split(":")[1])
    return policy


def find_declaration(name: str) -> Declaration:
    """Returns what the policy of a name says of itself.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    from tieroff.planner.policies.declaration import Declaration  # loads the simulator

    declared: Declaration = getattr(_module(name), "DECLARATION", Declaration())
    return declared


def _module(name: str) -> ModuleType:
    if name not in POLICIES:
        nearest = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown policy {name!r}; the nearest is {nearest[0]!r}, all are {', '.join(sorted(POLICIES))}"
        )
    return importlib.import_module(POLICIES[name].split(":")[0])
