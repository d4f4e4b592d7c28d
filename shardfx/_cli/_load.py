"""Loads the objects that command-line arguments name: models, rules, optimizers,
keyword arguments, TPU slices.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    checkpoint,
    chips,
    presets,
)
from shardfx.errors import ChipError, MeshError, PlanFormatError

from .._ground.text import printable
from ._usage import UsageError, calling, one_line


# The arguments `paths` and `axes` of `shardfx.plan`, each `None` if it is not given.
Rules = tuple[PathRules | None, AxisRules | None]


class LoadedModel(NamedTuple):
    """A model, checkpoint or plan that a command-line argument names. All arrays of its
    tree are ShapeDtypeStructs.

    `plan` is `None` unless the argument names a stored plan.
    """

    tree: PyTree
    plan: ShardPlan | None = None


def load_model(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    stack_experts: bool = False,
) -> LoadedModel:
    """Returns the tree of a named model, checkpoint or plan. Raises `UsageError` if
    there is none or loading fails.

    - `name`: a path of a checkpoint or a plan's JSON; `MODULE:CALLABLE`, which is
      traced with `equinox.filter_eval_shape`; or the name of a published model. An
      existing path has priority.
    - `arguments`: keyword arguments for the callable, or numbers of the published model
      to change, such as `layers`.
    - `stack_experts`: whether the experts of a layer of a published model are one
      array.
    """
    if not os.path.exists(name) and name in presets.models.names():
        keywords = {"stack_experts": stack_experts, **(arguments or {})}
        tree = calling(f"`{name}`", lambda: presets.models.tree(name, **keywords))
        return LoadedModel(tree)
    # A checkpoint may also lie in a store, as in `gs://bucket/step_100`.
    if os.path.exists(name) or ":" not in name or "://" in name:
        if arguments:
            hint = (
                "are for a callable or a published model; name one as MODULE:CALLABLE,"
                " or as llama3-8b"
            )
            raise UsageError(f"--kwargs {hint}, not {name!r}")
        return _model_in_file(name)
    model = attribute(name)
    if callable(model) and not isinstance(model, eqx.Module):
        model = calling(f"`{name}`", lambda: _evaluated(model, arguments or {}))
    elif arguments:
        raise UsageError(
            f"--kwargs are for a callable, but `{name}` is {model!r:.60}; leave them out"
        )
    elif isinstance(model, ShardPlan):
        return LoadedModel(model.structs, model)
    elif not calling(f"reading `{name}`", lambda: jax.tree.leaves(model)):
        raise UsageError(
            f"`{name}` is {model!r:.60}; name a callable that makes the model, or a tree"
            " of arrays."
        )
    tree = calling(f"reading `{name}`", lambda: jax.tree.map(_struct, model))
    return LoadedModel(tree)


def _struct(leaf: Any) -> Any:
    """The ShapeDtypeStruct of an array; another leaf as it is."""
    if eqx.is_array(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _model_in_file(path: str) -> LoadedModel:
    """Returns the stored plan or the checkpoint at `path`. Raises `UsageError` if there
    is none; the message proposes a published model, or MODULE:CALLABLE, if `path` looks
    like one.
    """
    if os.path.isfile(path):
        stored_plan = calling(f"reading {path!r}", lambda: _stored_plan(path))
        if stored_plan is not None:
            return LoadedModel(jax.tree.map(_struct, stored_plan.structs), stored_plan)
    try:
        tree = calling(
            f"reading {path!r}",
            lambda: checkpoint.structs(checkpoint.read_index(path)),
        )
        return LoadedModel(tree)
    except UsageError as error:
        hint = _near_models(path)
        if hint and not os.path.exists(path):
            raise UsageError(
                f"there is no file and no published model {path!r}{hint}"
            ) from error
        # `path` may be a module, as a file, a folder or a name.
        module = path.removesuffix(".py").rstrip("/").replace("/", ".")
        is_module_name = all(map(str.isidentifier, module.split(".")))
        is_other_file = os.path.isfile(path) and not path.endswith(".py")
        if is_other_file or not is_module_name:
            raise
        message = str(error).rstrip(".")
        raise UsageError(
            f"{message}. A model is named as MODULE:CALLABLE, as in `{module}:make`"
        ) from error


def _stored_plan(path: str) -> ShardPlan | None:
    """Returns the plan in a file; `None` if the file does not begin like a plan's JSON."""
    with open(path, "rb") as opened:
        first_bytes = opened.read(200)
        if b'"shardfx.plan' not in first_bytes:
            return None
        try:
            return ShardPlan.from_json((first_bytes + opened.read()).decode())
        except PlanFormatError as error:
            raise UsageError(f"{path!r}: {one_line(error)}") from error


def _near_models(name: str) -> str:
    """Returns a text such as "; did you mean 'llama3-8b'?" with the published models
    whose names are similar to `name`.

    Names from Hugging Face have an owner before the last "/", which is ignored:
    `meta-llama/Llama-3.1-8B`.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    return near(short, presets.models.names(), cutoff=0.75)


def load_rules(name: str, model: str) -> Rules:
    """Returns the PathRules and the AxisRules that `name` describes; `None` in place of
    those that it does not give. Raises `UsageError` if there are no such rules or
    loading fails.

    - `name`: path rules as text, recognised by "->"; a strategy for a published model,
      such as "fsdp_tp"; a rule set in `shardfx.presets`, such as "llama"; or
      `MODULE:NAME` of PathRules, AxisRules, both in a tuple, or a function without
      arguments that makes them. Strategies and rule sets take arguments:
      "fsdp_tp:tensor=model", "llama:head_dim=64".
    - `model`: the name of the model. A strategy needs a published model.
    """
    if "->" in name:
        return calling("reading --rules", lambda: PathRules.parse(name)), None
    # `fsdp_tp:tensor=model`, or `my_module:RULES`.
    set_name, _, arguments_text = name.partition(":")
    # A user's module may have the name of a rule set: if it exists, `llama:RULES` is
    # the name RULES in it.
    may_be_module = bool(arguments_text) and "=" not in arguments_text
    package = set_name.partition(".")[0] or "_"
    _find_in_current_directory()
    if not may_be_module or importlib.util.find_spec(package) is None:
        if set_name in presets.models.strategies():
            return _strategy_rules(name, set_name, arguments_text, model), None
        if set_name in rule_set_names():
            rule_set = calling(
                f"--rules {name}",
                lambda: vars(presets)[set_name](**_arguments(name, arguments_text)),
            )
            return _paths_and_axes(rule_set, f"rules {set_name!r}")
    if ":" not in name:
        hint = near(name, (*presets.models.strategies(), *rule_set_names()))
        raise UsageError(
            f"--rules {name!r} is neither MODULE:NAME nor a text like"
            " 'attention->fsdp.tensor, .*->fsdp(fsdp)', and no ready set has this"
            f" name{hint}"
        )
    rules = attribute(name)
    if callable(rules):
        rules = calling(f"`{name}()`", rules)
    return _paths_and_axes(rules, f"`{name}`")


def _find_in_current_directory() -> None:
    """Makes modules in the current directory importable. `python -m` puts it into
    `sys.path`, a console script does not.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def load_optimizer(name: str) -> Callable[..., Any]:
    """Returns the `init` function of the optimizer `name`, for `shardfx.follow`. Raises
    `UsageError` if there is none.

    The name is `MODULE:NAME` of an optimizer with the interface of optax, or of a
    function that makes one. The function needs no arguments or only `learning_rate`,
    which does not change the shapes of the state.
    """
    optimizer = attribute(name)
    if "init" not in dir(optimizer) and callable(optimizer):
        optimizer: Any = calling(f"`{name}()`", lambda: _optimizer(optimizer))
    if "init" not in dir(optimizer):
        raise UsageError(
            f"`{name}` is {optimizer!r:.60}; it must be an optimizer, with `init` and"
            " `update`, as optax makes them"
        )
    return optimizer.init


def _optimizer(make: Callable[..., object]) -> Any:
    """The optimizer that a function makes, with any learning rate if it needs one."""
    if "learning_rate" in inspect.signature(make).parameters:
        return make(learning_rate=1e-3)
    return make()


def _strategy_rules(
    text: str,
    strategy: str,
    arguments: str,
    model: str,
) -> PathRules:
    """Returns the path rules of a strategy for a published model. `text` is the value
    of --rules, such as "fsdp_tp:tensor=model", and `arguments` its part after the ":".
    Raises `UsageError` if `model` is no published one.
    """
    if model not in presets.models.names():
        if ":" not in model and not os.path.exists(model):
            hint = _near_models(model) or "; a model is named as MODULE:CALLABLE"
            raise UsageError(f"there is no file and no published model {model!r}{hint}")
        raise UsageError(
            f"--rules {text} is for a published model, as llama3-8b (`shardfx models`"
            f" lists them), not for {model!r}; name rules as MODULE:NAME or as a text,"
            " or a ready set, as in --rules llama"
        )
    return calling(
        f"--rules {text}",
        lambda: presets.models.rules_for(
            model, strategy, **_arguments(text, arguments)
        ),
    )


def _arguments(text: str, arguments: str) -> dict[str, Any]:
    """Parses the `arguments` of a rule set, such as "head_dim=64,fsdp=data". Raises
    `UsageError`, which shows `text`, the value of --rules, if it cannot.
    """
    values = {}
    for part in arguments.split(","):
        if part:
            key, _, value = part.partition("=")
            if key in values:
                raise UsageError(f"--rules {text!r:.200} has {key!r:.80} twice")
            values[key] = value
    if not all(values.values()):
        raise UsageError(
            f"--rules {text!r:.200} is not of the form NAME or NAME:key=value,..., as"
            " llama:head_dim=64"
        )
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        is_number = value.removeprefix("-").isdecimal()
        parsed[key] = int(value) if is_number else value
    return parsed


def _paths_and_axes(rules: object, what: str) -> Rules:
    """Returns PathRules and AxisRules, each `None` if missing, from an object that is
    one of them or holds one of each. Raises `UsageError`, which calls the object
    `what`, for anything else.
    """
    parts = rules if isinstance(rules, tuple | list) else (rules,)
    paths = [part for part in parts if isinstance(part, PathRules)]
    axes = [part for part in parts if isinstance(part, AxisRules)]
    has_others = len(paths) + len(axes) < len(parts)
    if not parts or has_others or len(paths) > 1 or len(axes) > 1:
        raise UsageError(
            f"{what} is {rules!r:.80}; it must be PathRules, AxisRules, or one of each"
            " in a tuple"
        )
    return next(iter(paths), None), next(iter(axes), None)


def made_of(name: str, cls: type, what: str) -> Any:
    """Returns the object `MODULE:NAME` if it is an instance of `cls`; otherwise calls
    it and returns the result.

    Raises `UsageError` if neither is an instance of `cls`. In the message, `what` is a
    phrase for such an instance.
    """
    value = attribute(name)
    if callable(value) and not isinstance(value, cls):
        value = calling(f"`{name}()`", value)
    if not isinstance(value, cls):
        raise UsageError(f"`{name}` is {value!r:.60}; it must be {what}")
    return value


def attribute(name: str) -> Any:
    """Imports a module and returns an object in it. `name` is `package.module:name`,
    with "." between attributes.

    Raises `UsageError` if there is no such module or object, or if the import fails.
    """
    module_name, _, attribute_name = name.partition(":")
    if module_name.endswith(".py") and os.path.isfile(module_name):
        folder, file = os.path.split(module_name)
        where = f", in the directory {folder!r}" if folder else ""
        raise UsageError(
            f"{module_name!r} is a file; name its module,"
            f" `{file[:-3]}:{attribute_name or 'NAME'}`{where}"
        )
    parts = [*module_name.split("."), *attribute_name.split(".")]
    if not attribute_name or not all(map(str.isidentifier, parts)):
        raise UsageError(
            f"{name!r} is not of the form MODULE:NAME, as in `my_package.model:make`"
        )
    _find_in_current_directory()
    spec = calling(
        f"finding `{module_name}`", lambda: importlib.util.find_spec(module_name)
    )
    if spec is None:
        raise UsageError(
            f"there is no module `{module_name}` in this directory or in the installed"
            " packages"
        )
    module = calling(
        f"importing `{module_name}`", lambda: importlib.import_module(module_name)
    )
    value: Any = module
    for part in attribute_name.split("."):
        if part not in dir(value):
            names = tuple(name for name in dir(value) if not name.startswith("_"))
            hint = near(part, names)
            if not hint:
                hint = f"; it has {', '.join(names[:8]) or 'nothing public'}"
            raise UsageError(f"module `{module_name}` has no `{attribute_name}`{hint}")
        value = getattr(value, part)
    return value


def _evaluated(function: Callable[..., object], arguments: Mapping[str, Any]) -> Any:
    """Returns the result of `function(**arguments)` as ShapeDtypeStructs, without
    running it.

    A parameter `key` that `arguments` lacks gets a PRNG key.
    """
    if "key" in inspect.signature(function).parameters and "key" not in arguments:
        arguments = {**arguments, "key": jax.eval_shape(lambda: jax.random.key(0))}
    return eqx.filter_eval_shape(function, **arguments)


def literals(text: str | None, flag: str) -> dict[str, Any]:
    """Parses keyword arguments whose values are Python literals: `depth=4, name="x"`.

    Raises `UsageError` with the text if it cannot be parsed. `flag` is the flag with
    this text, for messages.
    """
    try:
        call = ast.parse(f"call({text or ''}\n)", mode="eval").body
        # A closing bracket in the text could end the call early: then the expression is
        # not a single call.
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and not call.args
        ):
            values = {}
            for keyword in call.keywords:
                if keyword.arg is not None:
                    values[keyword.arg] = ast.literal_eval(keyword.value)
            if len(values) == len(call.keywords):
                return values
        cause = None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        cause = error
    form = (
        "NAME=VALUE, ..., with numbers, strings in quotes, bools or None, as in"
        f" --{flag} 'depth=4, name=\"small\"'"
    )
    raise UsageError(f"--{flag} {text!r:.200} is not of the form {form}") from cause


def near(name: str, names: tuple[str, ...], cutoff: float = 0.6) -> str:
    """Returns "; did you mean 'x' or 'y'?" with the names in `names` most similar to
    `name`; "" if there are none.

    `cutoff` is the least ratio of `difflib`, from 0 to 1, for which two names count as
    similar.
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)
    if not close:
        return ""
    texts = [repr(by_lower[candidate]) for candidate in close]
    return f"; did you mean {' or '.join(texts)}?"


def rule_set_names() -> tuple[str, ...]:
    """Returns the names of the rule sets in `shardfx.presets`: the functions that
    return PathRules or AxisRules.
    """
    names = []
    for name, value in sorted(vars(presets).items()):
        if inspect.isfunction(value):
            if value.__annotations__["return"] in (PathRules, AxisRules):
                names.append(name)
    return tuple(names)


def torus_slice(text: str) -> chips.Slice:
    """Returns the TPU slice with a name such as "tpu:v5p:8x8x8". Raises `UsageError`
    for a text that names none.
    """
    try:
        parsed = chips.parse_slice(text)
    except (MeshError, ChipError) as error:
        raise UsageError(f"--target: {error}") from error
    if not parsed.chip.torus_dims:
        raise UsageError(
            f"--target {text!r:.60}: a switch joins its chips, so there is no order to"
            " choose"
        )
    return parsed


def order_text(target: chips.Slice, mesh: MeshSpec) -> str:
    """Returns a text about the order in which `mesh` arranges the devices of the TPU
    slice `target`, with the mean number of links between neighbours on each mesh axis.
    """
    # The coordinates of each device from the last to the first, then its core.
    positions = itertools.product(
        *map(range, reversed(target.extents)), range(target.chip.devices_per_chip)
    )
    # Stand-ins with the attributes of JAX's devices, whose coordinates have three
    # dimensions.
    common = {
        "platform": "tpu",
        "device_kind": target.chip.kinds[0],
        "process_index": 0,
        "slice_index": 0,
    }
    devices = []
    for number, (*position, core) in enumerate(positions):
        coords = (*reversed(position), 0)[:3]
        device = types.SimpleNamespace(
            id=number,
            coords=coords,
            core_on_chip=core,
            **common,
        )
        devices.append(device)
    order = mesh.order(devices)
    # A mean for each mesh axis; `None` for devices without coordinates.
    means = zip(mesh.axis_names, order.mean_hops or (), strict=False)
    hops_text = ", ".join(f"{name} {mean:.2f}" for name, mean in means)
    order_line = (
        f"On {target.name}: {target.devices:,} devices, ordered by {order.method}; mean"
        f" hops: {hops_text}."
    )
    return "\n".join(map(printable, [order_line, *order.reasons]))
