"""The policies by name. A policy takes a Problem and returns a Plan.

`auto` and its parts are this package's own. The published policies stand in `tieroff.study.policies`, which no module of the
runtime's path imports: they are looked up there when a config or a command names one. To add one, put a file with a function
under `@policy("name")` (tieroff/planner/policy.py) into that folder: there is no list to extend. A policy in a package of
your own is named by "module:function" wherever a name is expected.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from tieroff.errors import ConfigError
from tieroff.planner import auto
from tieroff.planner.policy import Policy

_PUBLISHED = "tieroff.study.policies"


def find_policy(name: str) -> Policy:
    """Returns the policy of a name, or the one that "module:function" names.

    Modules are imported until the policy is found. Those whose file name begins the policy's name come first, so that
    a published policy costs the import of its own module, and `auto` that of its parts.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    if ":" in name:
        return _find_outside(name)
    for module in _by_likelihood(name):
        for policy in _declared(importlib.import_module(module)):
            if policy.name == name:
                return policy
    known = sorted(all_policies())
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown policy {name!r}; the nearest is {nearest[0]!r}, all are {', '.join(known)}")


def all_policies() -> dict[str, Policy]:
    """Returns every policy of this package by name, in order of name; imports all of their modules.

    Raises:
        ConfigError: two policies have one name.
    """
    found: dict[str, Policy] = {}
    for module in (*_own_modules(), *_published_modules()):
        for policy in _declared(importlib.import_module(module)):
            if policy.name in found:
                other = found[policy.name].make.__module__
                raise ConfigError(f"policy {policy.name!r} is declared twice, in {other} and in {module}: rename one")
            found[policy.name] = policy
    return dict(sorted(found.items()))


def _own_modules() -> Iterator[str]:
    """Yields the full names of the modules of `auto` and its parts."""
    return (info.name for info in pkgutil.walk_packages(auto.__path__, f"{auto.__name__}."))


def _published_modules() -> Iterator[str]:
    """Yields the full names of the modules that may declare published policies; imports their packages only when it is used."""
    package = importlib.import_module(_PUBLISHED)
    shared = f"{_PUBLISHED}.shared."
    for info in pkgutil.walk_packages(package.__path__, f"{_PUBLISHED}."):
        if not (info.ispkg or info.name.startswith(shared)):
            yield info.name


def _by_likelihood(name: str) -> Iterator[str]:
    """Yields modules, the likely ones first; the published ones are not listed while an own namesake may still be it."""
    for is_wanted in (True, False):
        for modules in (_own_modules, _published_modules):
            yield from (module for module in modules() if _is_namesake(module, name) is is_wanted)


def _is_namesake(module: str, name: str) -> bool:
    """True for a module whose file name begins a policy's name, and for all in a package that is named as the policy."""
    *_, package, file = module.split(".")
    word = name.replace("-", "_")
    return word == package or word.startswith(file)


def _declared(module: ModuleType) -> list[Policy]:
    """Returns the policies that a module declares, without those that it imports."""
    found = (value for value in vars(module).values() if isinstance(value, Policy))
    return [policy for policy in found if policy.make.__module__ == module.__name__]


def _find_outside(name: str) -> Policy:
    module_name, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"expected a policy {function!r} in a module {module_name!r}, but {error}") from error
    if not isinstance(found, Policy):
        raise ConfigError(
            f"expected {name} to be a function under @policy (tieroff.planner.policy), got {type(found).__name__}"
        )
    return found
