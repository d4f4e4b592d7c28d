"""Loads models, rules and optimizers by the names that a command line gives them."""

import functools as ft
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from shardfx import AxisRules, PathRules, ShardPlan, checkpoint, presets
from shardfx.errors import PlanFormatError

from ._usage import UsageError, calling, one_line
from ._words import near, rule_set_names, whole_number


Rules = tuple[PathRules | None, AxisRules | None]


class LoadedModel(NamedTuple):
    """A model that a command line names: its arrays as structs, and its plan if the name refers to a plan, else
    `None`.
    """

    tree: PyTree
    plan: ShardPlan | None = None


def load_model(name: str, arguments: Mapping[str, object] | None = None, *, stack_experts: bool = False) -> LoadedModel:
    """Returns the tree of structs of a named model, checkpoint or plan.

    **Arguments:**

    - `name`: a path of a checkpoint or a plan's JSON; `MODULE:CALLABLE`, which is traced with
        `equinox.filter_eval_shape`; or the name of a published model. An existing path has priority.
    - `arguments`: keyword arguments for the callable, or changed numbers for the published model.
    - `stack_experts`: whether the experts of a layer of a published model are one array.

    **Returns:**

    A LoadedModel, in whose tree all arrays are ShapeDtypeStructs.

    **Raises:**

    `UsageError` if the name refers to nothing, or loading fails.
    """
    if not os.path.exists(name) and name in presets.models.names():
        named = {"stack_experts": stack_experts, **(arguments or {})}
        return LoadedModel(calling(f"`{name}`", lambda: presets.models.tree(name, **named)))
    if os.path.exists(name) or ":" not in name:
        if arguments:
            hint = "are for a callable or a published model; name one as MODULE:CALLABLE, or as llama3-8b"
            raise UsageError(f"--kwargs {hint}, not {name!r}")
        return _file(name)
    made = attribute(name)
    if callable(made) and not isinstance(made, eqx.Module):
        made = calling(f"`{name}`", lambda: _evaluated(name, made, arguments or {}))
    elif arguments:
        raise UsageError(f"--kwargs are for a callable, but `{name}` is {made!r:.60}; leave them out")
    elif isinstance(made, ShardPlan):
        return LoadedModel(made.structs, made)
    elif not calling(f"reading `{name}`", lambda: jax.tree.leaves(made)):
        raise UsageError(f"`{name}` is {made!r:.60}; name a callable that makes the model, or a tree of arrays.")
    return LoadedModel(calling(f"reading `{name}`", lambda: jax.tree.map(_struct, made)))


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf


def _file(path: str) -> LoadedModel:
    if os.path.isfile(path):
        text = calling(f"reading {path!r}", lambda: _text_of_plan(path))
        if text is not None:
            made = calling(f"reading {path!r}", lambda: _plan(path, text))
            return LoadedModel(jax.tree.map(_struct, made.structs), made)
    return LoadedModel(_checkpoint(path))


def _text_of_plan(path: str) -> str | None:
    """Returns the text of a file if it begins as a plan's JSON does, else `None`."""
    with open(path, "rb") as opened:
        if b'"shardfx.plan' not in opened.read(200):
            return None
    with open(path, encoding="utf-8") as opened:
        return opened.read()


def _plan(path: str, text: str) -> ShardPlan:
    try:
        return ShardPlan.from_json(text)
    except PlanFormatError as error:
        raise UsageError(f"{path!r}: {one_line(error)}") from error


def _checkpoint(path: str) -> PyTree:
    try:
        return calling(f"reading {path!r}", lambda: checkpoint.structs(checkpoint.read_index(path)))
    except UsageError as error:
        hint = _near_models(path)
        if hint and not os.path.exists(path):
            raise UsageError(f"there is no file and no published model {path!r}{hint}") from error
        module = path.removesuffix(".py").rstrip("/").replace("/", ".")
        data = os.path.isfile(path) and not path.endswith(".py")
        if data or path.endswith(".safetensors") or not all(part.isidentifier() for part in module.split(".")):
            raise
        told = str(error).rstrip(".")
        raise UsageError(f"{told}. A model is named as MODULE:CALLABLE, as in `{module}:make`") from error


def _near_models(name: str) -> str:
    """Returns a hint with published models of a similar name; also for Hugging Face's form,
    `meta-llama/Llama-3.1-8B`.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    return near(short, presets.models.names(), cutoff=0.75)


def load_rules(name: str, model: str) -> Rules:
    """Returns the path rules and the axis rules that a name refers to; either may be `None`.

    **Arguments:**

    - `name`: path rules as text, recognised by "->"; a strategy for a published model, such as "fsdp_tp"; one of
        `rule_set_names()`; or `MODULE:NAME` of PathRules, AxisRules, both in a tuple, or a function without arguments
        that makes them. Strategies and rule sets take arguments: "fsdp_tp:tensor=model", "llama:head_dim=64".
    - `model`: the model's name.

    **Returns:**

    The arguments `paths` and `axes` of `shardfx.plan`.

    **Raises:**

    `UsageError` if the name refers to nothing or to something other than rules, or loading fails.
    """
    if "->" in name:
        return calling("reading --rules", lambda: PathRules.parse(name)), None
    first, _, given = name.partition(":")
    # A user's module may have the name of a rule set: if it exists, `llama:RULES` is the name RULES in it.
    if not given or "=" in given or importlib.util.find_spec(first.partition(".")[0] or "_") is None:
        if first in presets.models.strategies():
            return _strategy(name, first, given, model), None
        if first in rule_set_names():
            return _rule_set(name, first, given)
    if ":" not in name:
        hint = near(name, (*presets.models.strategies(), *rule_set_names()))
        raise UsageError(
            f"--rules {name!r} is neither MODULE:NAME nor a text like 'attention->fsdp.tensor, .*->fsdp(fsdp)', and "
            f"no ready set has this name{hint}"
        )
    found = attribute(name)
    if callable(found):
        found = calling(f"`{name}()`", found)
    return _sorted(found, f"`{name}`")


def load_optimizer(name: str) -> Callable[..., Any]:
    """Returns the `init` function of an optimizer.

    **Arguments:**

    - `name`: `MODULE:NAME` of an optimizer with the interface of optax, or of a function that makes one. The function
        needs no arguments or only `learning_rate`, which does not change the shapes of the state.

    **Returns:**

    The optimizer's `init`, for `shardfx.follow`.

    **Raises:**

    `UsageError` if the name refers to nothing or not to an optimizer, or the function fails.
    """
    found = attribute(name)
    if "init" not in dir(found) and callable(found):
        found: Any = calling(f"`{name}()`", lambda: _optimizer(found))
    if "init" not in dir(found):
        raise UsageError(
            f"`{name}` is {found!r:.60}; it must be an optimizer, with `init` and `update`, as optax makes them"
        )
    return found.init


def _strategy(text: str, how: str, given: str, model: str) -> PathRules:
    if model not in presets.models.names():
        if ":" not in model and not os.path.exists(model):
            hint = _near_models(model) or "; a model is named as MODULE:CALLABLE"
            raise UsageError(f"there is no file and no published model {model!r}{hint}")
        raise UsageError(
            f"--rules {text} is for a published model, as llama3-8b (`shardfx models` lists them), not for {model!r}; "
            "name rules as MODULE:NAME or as a text, or a ready set, as in --rules llama"
        )
    arguments = _arguments(text, given)
    return calling(f"--rules {text}", lambda: presets.models.rules_for(model, how, **arguments))


def _rule_set(text: str, name: str, given: str) -> Rules:
    """Returns the rules of a rule set, such as `llama`, called with its arguments, as in
    `llama:head_dim=64,fsdp=data`.
    """
    arguments = _arguments(text, given)
    return _sorted(calling(f"--rules {text}", lambda: vars(presets)[name](**arguments)), f"rules {name!r}")


def _arguments(text: str, given: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in given.split(",") if part]
    numbers = {key: whole_number(value) for key, _, value in pairs}
    if any(not value or (value.isdecimal() and numbers[key] is None) for key, _, value in pairs):
        raise UsageError(f"--rules {text!r:.200} is not of the form NAME or NAME:key=value,..., as llama:head_dim=64")
    return {key: value if numbers[key] is None else numbers[key] for key, _, value in pairs}


def _sorted(found: object, what: str) -> Rules:
    pieces = found if isinstance(found, tuple | list) else (found,)
    paths = [piece for piece in pieces if isinstance(piece, PathRules)]
    axes = [piece for piece in pieces if isinstance(piece, AxisRules)]
    if len(paths) > 1 or len(axes) > 1 or not pieces or len(paths) + len(axes) < len(pieces):
        raise UsageError(f"{what} is {found!r:.80}; it must be PathRules, AxisRules, or one of each in a tuple")
    return next(iter(paths), None), next(iter(axes), None)


def attribute(name: str) -> Any:
    """Imports a module and returns the object in it that `package.module:name.in.it` names."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") and os.path.isfile(module_name):
        folder, file = os.path.split(module_name)
        where = f", in the directory {folder!r}" if folder else ""
        raise UsageError(f"{module_name!r} is a file; name its module, `{file[:-3]}:{attribute or 'NAME'}`{where}")
    if not attribute or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise UsageError(f"{name!r} is not of the form MODULE:NAME, as in `my_package.model:make`")
    # `python -m` puts the current directory into `sys.path`, a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if calling(f"finding `{module_name}`", lambda: importlib.util.find_spec(module_name)) is None:
        raise UsageError(f"there is no module `{module_name}` in this directory or in the installed packages")
    module = calling(f"importing `{module_name}`", lambda: importlib.import_module(module_name))
    found: Any = module
    for part in attribute.split("."):
        if part not in dir(found):
            names = tuple(name for name in dir(found) if not name.startswith("_"))
            hint = near(part, names) or f"; it has {', '.join(names[:8]) or 'nothing public'}"
            raise UsageError(f"module `{module_name}` has no `{attribute}`{hint}")
        found = getattr(found, part)
    return found


def _optimizer(make: Callable[..., object]) -> Any:
    return make(learning_rate=1e-3) if _needed(make) == ["learning_rate"] else make()


def _needed(function: Any) -> list[str]:
    # Classes without an `__init__` of their own and functions from C may have no signature.
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _evaluated(name: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    parameters, needed = inspect.signature(function).parameters.values(), _needed(function)
    key = jax.eval_shape(lambda: jax.random.key(0))
    check_arguments(name, parameters, arguments)
    missing = [other for other in needed if other != "key" and other not in arguments]
    if missing:
        raise UsageError(
            f"`{name}` needs the arguments {', '.join(missing)}; give numbers and strings as "
            f"--kwargs '{missing[0]}=...', or name a callable that needs `key` alone, "
            f"as in `def make(key): return {name.rpartition(':')[2]}(..., key=key)`"
        )
    make = ft.partial(function, **arguments)
    if any(p.name == "key" and p.kind is p.POSITIONAL_ONLY for p in parameters):
        return eqx.filter_eval_shape(make, key)
    takes_key = "key" in {p.name for p in parameters} and "key" not in arguments
    return eqx.filter_eval_shape(make, **({"key": key} if takes_key else {}))


def check_arguments(name: str, parameters: Iterable[inspect.Parameter], arguments: Mapping[str, object]) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
    for given in arguments:
        if given not in known:
            hint = near(given, tuple(known)) or f"; it takes {', '.join(known) or 'none'}"
            raise UsageError(f"`{name}` takes no argument `{given}` by name{hint}")
