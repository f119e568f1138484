"""Compares the stand-ins, and the connector's hooks, with the classes of the vLLM that is installed.

`python -m tests.support.vllm.compare` prints the differences and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Set
from typing import Any

from kvctl_agent.integrations.vllm.observe import hooks, mooncake, observer
from tests.support.vllm import mooncake_connector
from tests.support.vllm.nixl_connector import HALVES, NixlWrapper
from tests.support.vllm.stand_ins import MODULES, Request

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"

_Shape = list[tuple[str, Any, Any]]


def differences() -> list[str]:
    """Returns one line for each thing that a stand-in has otherwise than vLLM."""
    found = []
    for module, members in MODULES.items():
        theirs = importlib.import_module(module)
        for own in members:
            real = getattr(theirs, own.__name__, None)
            if real is None:
                found.append(f"{module} has no {own.__name__}")
            elif own is Request:
                found += _attributes(real)
            elif isinstance(own, type):
                found += _classes(own, real)
            elif _shape(own) != _shape(real):
                found.append(f"{own.__name__}{inspect.signature(own)}: vLLM's is {inspect.signature(real)}")
    return found


def foreign_hooks(connector: type, *bases: type) -> list[str]:
    """Returns one line for each method of a connector that vLLM does not call, or calls with other arguments."""
    found = [f"{name} is abstract" for name in sorted(getattr(connector, "__abstractmethods__", ()))]
    for name, method in vars(connector).items():
        if name.startswith("_") or not _is_method(method):
            continue
        real = next((getattr(base, name) for base in bases if hasattr(base, name)), None)
        if real is None:
            found.append(f"vLLM has no {name}")
        elif _shape(getattr(connector, name)) != _shape(real):
            found.append(f"{name}{inspect.signature(getattr(connector, name))}: vLLM's is {inspect.signature(real)}")
    return found


def other_parameters(halves: Iterable[type], hooked: Set[str], *modules: str) -> list[str]:
    """Returns one line for each hooked method whose parameters differ between a stand-in and the class of a module.

    Also returns one for each hooked name that no stand-in shares with its class, so that nothing was compared.
    """
    found, left = [], set(hooked)
    for own in halves:
        kinds = (getattr(importlib.import_module(module), own.__name__, None) for module in modules)
        real = next(filter(None, kinds), None)
        if real is None:
            found.append(f"no module has {own.__name__}")
            continue
        for name in sorted(each for each in hooked if hasattr(own, each) and hasattr(real, each)):
            left.discard(name)
            ours, theirs = (list(inspect.signature(getattr(each, name)).parameters) for each in (own, real))
            if ours != theirs:
                found.append(f"{own.__name__}.{name} has the parameters {ours}: those of the engine are {theirs}")
    return found + [f"{name} is hooked, and no stand-in shares it with its class" for name in sorted(left)]


def posts_without_a_request(hooked: Set[str], *modules: str) -> list[str]:
    """Returns one line for each method that makes NIXL's handles, and that other methods than hooked ones may call.

    The hooks take the request of a handle from the hooked method in which it is made.
    """
    sources = [inspect.getsource(importlib.import_module(module)) for module in modules]
    methods = [each for text in sources for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]

    def callers(name: str) -> set[str]:
        return {
            method.name
            for method in methods
            if any(isinstance(each, ast.Attribute) and each.attr == name for each in ast.walk(method))
        }

    posting = callers("make_prepped_xfer")
    if not posting:
        return ["no method calls make_prepped_xfer"]
    outside = [name for name in posting - hooked if not callers(name) or callers(name) - hooked]
    return [f"{name} calls make_prepped_xfer, and is not called by hooked methods alone" for name in sorted(outside)]


def _classes(own: type, real: type) -> Iterator[str]:
    if issubclass(own, enum.Enum):
        values = [{name: member.value for name, member in each.__members__.items()} for each in (own, real)]  # type: ignore[attr-defined]
        if values[0] != values[1]:
            yield f"{own.__name__} has {values[0]}: vLLM's has {values[1]}"
        return
    abstract = [sorted(getattr(each, "__abstractmethods__", ())) for each in (own, real)]
    if abstract[0] != abstract[1]:
        yield f"{own.__name__} has abstract {abstract[0]}: vLLM's has {abstract[1]}"
    bases = [{base.__name__ for base in each.__mro__} for each in (own, real)]
    if missing := bases[0] - bases[1]:
        yield f"{own.__name__} is a {', '.join(sorted(missing))}: vLLM's is not"
    if dataclasses.is_dataclass(own):
        yield from _fields(own, real)
    for name, member in vars(own).items():
        if name.startswith("_") or (dataclasses.is_dataclass(own) and name in own.__dataclass_fields__):
            continue
        if not hasattr(real, name):
            yield f"{own.__name__} has {name}: vLLM's has not"
        elif _is_method(member) and _shape(getattr(own, name)) != _shape(getattr(real, name)):
            yield f"{own.__name__}.{name}{inspect.signature(getattr(own, name))}: vLLM's is " + str(
                inspect.signature(getattr(real, name))
            )


def _fields(own: type, real: type) -> Iterator[str]:
    """A stand-in may leave out fields that have defaults."""
    ours, theirs = ({each.name: each for each in dataclasses.fields(kind)} for kind in (own, real))
    for name, each in ours.items():
        if name not in theirs:
            yield f"{own.__name__} has {name}: vLLM's has not"
        elif not each.init or not theirs[name].init:
            continue
        elif not _optional(each) and _optional(theirs[name]):
            yield f"{own.__name__} needs {name}: vLLM's has a default"
        elif (values := (_default(each), _default(theirs[name])))[0] != values[1]:
            yield f"{own.__name__} has {name}={values[0]}: vLLM's has {values[1]}"
    for name, each in theirs.items():
        if each.init and not _optional(each) and (name not in ours or _optional(ours[name])):
            yield f"{own.__name__} does not need {name}: vLLM's does"


def _attributes(real: type) -> Iterator[str]:
    """Compares the attributes of a request."""
    sampling = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=1)
    request = real("request", [1, 2, 3], sampling, None)
    for each in dataclasses.fields(Request):
        if not hasattr(request, each.name):
            yield f"Request has {each.name}: vLLM's has not"


def _optional(each: dataclasses.Field[Any]) -> bool:
    return each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING


def _default(each: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field that has one; None if it is made anew each time."""
    value = getattr(each.default, "default", each.default)  # of pydantic's
    return None if value is dataclasses.MISSING or type(value).__name__ == "PydanticUndefinedType" else value


def _is_method(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod)


def _shape(function: Any) -> _Shape:
    """Returns the name, kind and default of each parameter."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def main() -> None:
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    connector = importlib.import_module("kvctl_agent.integrations.vllm.connector").KvctlConnector
    all_connectors = (*observer.SCHEDULER, *observer.WORKER)
    posting = {name for _, name, _ in (*hooks.PULL, *hooks.PUSH)}
    nixl = posting | {name for _, name, _ in (*all_connectors, *hooks.SCHEDULER, *hooks.WORKER)}
    agent = {name for _, name, _ in hooks.AGENT}
    written = {name for _, name, _ in (*all_connectors, *mooncake.SCHEDULER, *mooncake.WORKER)}
    modules = [f"{NIXL}.{half}" for half in ("pull_scheduler", "push_scheduler", "pull_worker", "push_worker")]
    found = [
        *differences(),
        *foreign_hooks(connector, base.KVConnectorBase_V1, base.SupportsHMA),
        *other_parameters(HALVES, nixl, *modules),
        *other_parameters(mooncake_connector.HALVES, written, MOONCAKE),
        *other_parameters([type("nixl_agent", (NixlWrapper,), {})], agent, "nixl._api"),
        *posts_without_a_request(posting, *(f"{NIXL}.{each}_worker" for each in ("base", "pull", "push"))),
    ]
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
