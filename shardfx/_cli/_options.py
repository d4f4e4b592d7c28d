"""The command-line arguments that several verbs share. They name a model, a mesh, rules
or a training step.
"""

import contextlib
import dataclasses
import functools as ft
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import click
import jax

from shardfx import MeshSpec, ShardPlan, auto, chips, cost, follow, lint, plan, presets
from shardfx._see import Findings

from ._load import (
    LoadedModel,
    attribute,
    literals,
    load_model,
    load_optimizer,
    load_rules,
    near,
    torus_slice,
)
from ._screen import working
from ._usage import UsageError, calling


# JAX starts a thread for each emulated device.
MOST_DEVICES = 512


class LoadedStep(NamedTuple):
    """A training step, its arguments as ShapeDtypeStructs with shardings, and the mesh
    of these shardings.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: MeshSpec


def load_step(name: str, kwargs: str | None, mesh: MeshSpec | str | None) -> LoadedStep:
    """Calls the function `MODULE:FUNCTION` that a user names, and returns the training
    step and the arguments that it makes.

    The function returns the step and a tuple of its arguments: trees of
    ShapeDtypeStructs with shardings, such as `plan.structs`, or values that are not
    arrays. `kwargs` are the function's keyword arguments as text. `mesh` is the value
    of its parameter `mesh`; `None` to pass no mesh. Raises `UsageError` if there is no
    such function, if it fails, or if it returns something else.
    """
    if isinstance(mesh, str):
        mesh = calling("reading --mesh", ft.partial(MeshSpec.parse, mesh))
    function, args = _step_and_args(name, kwargs, mesh)
    if mesh is None:
        mesh = _mesh_of_args(name, args)
    return LoadedStep(
        function=function,
        args=args,
        mesh=mesh,
    )


def load_bare_step(
    name: str,
    kwargs: str | None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Calls the user's function `name`, `MODULE:FUNCTION`, without a mesh, and returns
    the step and the arguments that it makes. Their ShapeDtypeStructs have no shardings.
    `kwargs` are the function's keyword arguments as text.
    """
    function, args = _step_and_args(name, kwargs, None)
    return function, jax.tree.map(_without_sharding, args)


def _without_sharding(leaf: object) -> object:
    """A ShapeDtypeStruct without its sharding; another leaf as it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _step_and_args(
    name: str,
    kwargs: str | None,
    mesh: MeshSpec | None,
) -> tuple[Any, tuple[Any, ...]]:
    """Calls the user's function `name`, and returns the step and the arguments that it
    makes. `kwargs` are its keyword arguments as text, and `mesh` is the value of its
    parameter `mesh`. Raises `UsageError` if it returns anything else.
    """
    maker = attribute(name)
    if not callable(maker):
        raise UsageError(
            f"`{name}` is {maker!r:.60}; name a function that returns a step and its"
            " arguments"
        )
    parameters = calling(f"`{name}`", lambda: inspect.signature(maker)).parameters
    keywords = literals(kwargs, "kwargs")
    if "mesh" in parameters and mesh is not None:
        keywords["mesh"] = mesh
    if "mesh" not in parameters and mesh is not None:
        raise UsageError(
            f"`{name}` takes no `mesh`, so its plans have their own; leave out --mesh"
        )
    result: Any = calling(f"`{name}`", lambda: maker(**keywords))
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not callable(result[0]) or not isinstance(result[1], tuple):
        form = (
            "a step and a tuple of its arguments, as in `return train_step,"
            " (params_plan.structs, batch)`"
        )
        raise UsageError(f"`{name}` must return {form}, not {result!r:.60}")
    return result


def chip_of(name: str) -> chips.Chip:
    """The accelerator with a name, the value of --chip."""
    return calling("reading --chip", ft.partial(chips.find, name))


def traffic_of(step: LoadedStep, how: str, target: str | None = None) -> Any:
    """Returns the traffic of a step: its collectives and the bytes that they send.

    `how` is "estimate" for an estimate, "compile" for the traffic of the compiled step,
    or "compare" for a comparison of both. The step is compiled for the TPU slice
    `target`, such as "tpu:v5e:4x4", or else for emulated CPU devices.
    """
    # A comparison needs an estimate for the compiler that compiles the step.
    compiled_for_cpu = how == "compare" and target is None
    compiler = "cpu" if compiled_for_cpu else "tpu"
    options = {"compiler": compiler, "mesh": step.mesh}
    estimate = ft.partial(cost.estimate, step.function, *step.args, **options)
    if how == "estimate":
        return calling("estimating the step's traffic", estimate)
    sent = calling(
        "reading the program", lambda: cost.traffic(compiled(step, target), step.mesh)
    )
    if how == "compile":
        return sent
    return calling("comparing", lambda: cost.compare(estimate(), sent))


def fit_of(step: LoadedStep, chip: chips.Chip, program: object = None) -> cost.Fit:
    """Returns the memory that a step needs on a chip. `program` is the compiled step;
    if `None`, the memory is estimated.
    """
    with working("counting memory"):
        options = {"compiled": program, "chip": chip, "mesh": step.mesh}
        return calling(
            "counting memory", lambda: cost.fit(step.function, *step.args, **options)
        )


def compiled(step: LoadedStep, target: str | None = None) -> Any:
    """Compiles a step for the TPU slice `target`, such as "tpu:v5e:4x4", or else for
    emulated CPU devices.

    A TPU slice need not exist here. Raises `UsageError` if JAX has started with fewer
    devices, the step does not compile, or no compiler for the target is installed.
    """
    if target is None:
        emulate(step.mesh.size, f"the mesh {step.mesh} has")
    options = {"target": target or "cpu", "mesh": step.mesh}
    return calling(
        "compiling the step",
        lambda: cost.compile_for(step.function, *step.args, **options),
    )


def emulate(count: int, what: str = "the target has") -> None:
    """Makes JAX start with `count` emulated CPU devices. In error messages, `what`
    stands before this number.

    Raises `UsageError` if `count` exceeds `MOST_DEVICES`, or JAX has started with fewer
    devices.
    """
    if count > MOST_DEVICES:
        hint = (
            f"at most {MOST_DEVICES} can be emulated; `shardfx traffic --how estimate`"
            " needs none"
        )
        raise UsageError(f"{what} {count:,} devices; {hint}")
    # JAX reads these when it starts a backend; afterwards a change raises RuntimeError.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        raise UsageError(
            f"JAX has started with {len(jax.devices())} devices, and {what} {count}"
        )


def _mesh_of_args(name: str, args: object) -> MeshSpec:
    """Returns the mesh of the shardings in `args`, the arguments of a step. Raises
    `UsageError` if they are on no mesh or on several. `name` is what the user calls the
    step.
    """
    meshes: dict[MeshSpec, None] = {}
    for leaf in jax.tree.leaves(args):
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
        if is_struct and isinstance(leaf.sharding, jax.NamedSharding):
            meshes[MeshSpec.of(leaf.sharding.mesh)] = None
    if len(meshes) != 1:
        where = "no mesh"
        if meshes:
            where = f"several meshes, {' and '.join(map(str, meshes))}"
        raise UsageError(f"the arguments of `{name}` are on {where}; plan them on one")
    return next(iter(meshes))


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The command-line arguments that name a model, a mesh and rules, before they are
    parsed.

    Each field has the value of the option of its name; `model` is the argument MODEL.
    `kwargs` has keyword arguments for the model, `devices` is the number of devices,
    and `target` the name of a TPU slice. `how` has the keyword arguments of
    `shardfx.plan` that need no parsing, such as `strict`.
    """

    model: str | None
    kwargs: str | None
    dtype: str | None
    mesh: str | None
    devices: int | None
    target: str | None
    rules: str | None
    optimizer: str | None
    how: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The parsed command-line arguments that name a model, a mesh and rules.

    `rules` has the arguments of `shardfx.plan` other than the tree and the mesh.
    `target` is the TPU slice of --target. `why` is the reason for the rules that
    `shardfx.auto.plan` chose; "" if the command line has rules.
    """

    model: LoadedModel
    mesh: MeshSpec
    rules: Mapping[str, Any]
    target: chips.Slice | None
    why: str = ""


_OPTIONS = (
    click.option(
        "--mesh",
        metavar="MESH",
        help="As in data=64,fsdp=16,tensor=8; one size may be -1.",
    ),
    click.option(
        "--rules",
        metavar="RULES",
        help=(
            "Without them, --devices or --target alone choose."
            " For a published model: dp, fsdp, tp, fsdp_tp, ep. For others: a ready set,"
            " as in llama:head_dim=64; MODULE:NAME of PathRules, AxisRules, a pair of"
            " both, or a function that makes them; or path rules as a text,"
            " 'attention|mlp->fsdp.tensor, .*->fsdp(fsdp)'."
        ),
    ),
    click.option(
        "--kwargs",
        metavar="NAME=VALUE,...",
        help="For the model, as in 'layers=4, hidden=1024'.",
    ),
    click.option(
        "--dtype",
        metavar="DTYPE",
        help="Of a published model's arrays, as float32.",
    ),
    click.option(
        "--optimizer",
        metavar="MODULE:NAME",
        help="Plan its state too, as in optax:adamw.",
    ),
    click.option(
        "--mode",
        metavar="MODE",
        help="In which AxisRules are read, as in decode.",
    ),
    click.option(
        "--target",
        metavar="tpu:KIND:AxBxC",
        help="A TPU slice, as in tpu:v5p:8x8x8; fills a size of -1.",
    ),
    click.option(
        "--devices",
        type=click.IntRange(1),
        help="How many devices fill a size of -1.",
    ),
    click.option(
        "--min-bytes",
        type=click.IntRange(0),
        default=0,
        help="Replicate arrays of fewer bytes.",
    ),
    click.option(
        "--unmatched",
        type=click.Choice(["raise", "replicate"]),
        default="raise",
        help="Arrays without a rule.",
    ),
    click.option(
        "--unused",
        type=click.Choice(["raise", "allow"]),
        default="raise",
        help="Rules that never apply.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Fail where an array cannot be sharded as its rule asks.",
    ),
    click.option(
        "--refine",
        is_flag=True,
        help="Split mesh axes of which a dimension can take a part.",
    ),
)
_HOW = ("mode", "min_bytes", "unmatched", "unused", "strict", "refine")
# The text about the argument MODEL in the help of every verb that has one.
MODEL_HELP = """MODEL is a published one by name (see `shardfx models`), as llama3-405b; MODULE:CALLABLE, which makes
    the model and is traced, not run, or MODULE:NAME of a tree; a checkpoint, of which only headers are read; or a plan
    that was written as JSON."""


def takes_plan_options(
    *,
    model_is_needed: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the command-line arguments of `PlanOptions` to a
    verb (a command), which gets them as one value. With `model_is_needed`, the argument
    MODEL may not be left out.
    """
    fields = dataclasses.fields(PlanOptions)
    # `how` has the values of several options, of which `_HOW` has the names.
    names = [field.name for field in fields if field.name != "how"]
    metavar = "MODEL" if model_is_needed else "[MODEL]"
    model_argument = click.argument(
        "model",
        type=click.Path(),
        required=model_is_needed,
        metavar=metavar,
    )

    def decorated(function: Callable[..., object]) -> Callable[..., Any]:
        """The verb `function` with the arguments added."""

        @ft.wraps(function)
        def call(**parsed: Any) -> Any:
            # What is left of the parsed arguments are those of the verb alone.
            how = {name: parsed.pop(name) for name in _HOW}
            options = PlanOptions(**{name: parsed.pop(name) for name in names}, how=how)
            return function(options, **parsed)

        call.__doc__ = (function.__doc__ or "").replace("{MODEL}", MODEL_HELP)
        command: Callable[..., Any] = call
        for decorator in (*reversed(_OPTIONS), model_argument):
            command = decorator(command)
        return command

    return decorated


def inputs_of(options: PlanOptions) -> Inputs:
    """Parses the options and loads the model and the rules. Raises `UsageError` for a
    missing or invalid argument.

    The result's `rules` are keyword arguments of `shardfx.plan`; for a stored plan,
    which needs none, they are empty. If the options have no rules, and MODEL names no
    stored plan, `shardfx.auto.plan` chooses them.
    """
    if options.model is None:
        raise UsageError(
            "Missing argument 'MODEL'; name one, as in llama3-8b or my_model:make"
        )
    is_bare = options.mesh is None and options.rules is None
    # The options of a model, such as --kwargs, may be for the other plan of `diff`.
    if is_bare and os.path.isfile(options.model):
        model = load_model(options.model)
        if model.plan is not None:
            return Inputs(model=model, mesh=model.plan.mesh, rules={}, target=None)
    if options.dtype is not None and options.model not in presets.models.names():
        raise UsageError(
            "--dtype is for a published model, as llama3-8b, not for"
            f" {options.model!r}; leave it out"
        )
    if options.rules is None:
        model = _model(options)
        if model.plan is not None and options.mesh is None:
            return Inputs(model=model, mesh=model.plan.mesh, rules={}, target=None)
        return _inputs_without_rules(options, model)
    if options.mesh is None:
        raise UsageError(
            "Missing option '--mesh'; give one, as in --mesh data=64,fsdp=16,tensor=8"
        )
    target = None if options.target is None else torus_slice(options.target)
    count = None if target is None else target.devices
    mesh = calling("reading --mesh", lambda: _mesh_of_options(options, count))
    paths, axes = load_rules(options.rules, options.model)
    # The strategy "ep" shards the dimension along which experts are stacked.
    is_expert_parallel = options.rules.partition(":")[0] == "ep"
    model = _model(options, stack_experts=is_expert_parallel)
    return Inputs(
        model=model,
        mesh=mesh,
        rules={"paths": paths, "axes": axes, **options.how},
        target=target,
    )


def _model(options: PlanOptions, *, stack_experts: bool = False) -> LoadedModel:
    """Loads the model that the options name. `stack_experts` is for a published one."""
    name = options.model or ""
    kwargs = literals(options.kwargs, "kwargs")
    if options.dtype is not None:
        kwargs["dtype"] = options.dtype
    with working(f"reading {name}"):
        return load_model(name, kwargs, stack_experts=stack_experts)


def _inputs_without_rules(options: PlanOptions, model: LoadedModel) -> Inputs:
    """The inputs with the mesh and rules that `shardfx.auto.plan` chooses for the model
    on the devices of --devices, --target or --mesh.
    """
    target = hardware = None
    if options.target is not None:
        hardware = calling("reading --target", lambda: chips.find(options.target or ""))
        # A switch, or several slices, have no order of devices to show.
        if hardware.torus_dims and "*" not in options.target:
            target = torus_slice(options.target)
    devices: Any = options.target or options.devices
    if options.mesh is not None:
        count = None if target is None else target.devices
        devices = calling("reading --mesh", lambda: _mesh_of_options(options, count))
    if devices is None:
        raise UsageError(
            "say for which devices: --devices 8 or --target tpu:v5e:4x4 alone, or --mesh"
            " and --rules, as in --mesh fsdp=8 --rules '.*->fsdp(fsdp)'"
        )
    name = options.optimizer
    optimizer = None if name is None else load_optimizer(name)
    chosen = calling(
        "planning without --rules",
        lambda: auto.plan(model.tree, devices, optimizer=optimizer, chip=hardware),
    )
    rules = {"paths": chosen.rules, "axes": None, **options.how}
    return Inputs(
        model=model,
        mesh=chosen.mesh,
        rules=rules,
        target=target,
        why=chosen.why,
    )


def say_choice(inputs: Inputs) -> Inputs:
    """Prints, on standard error, the reason for the rules that `shardfx.auto.plan`
    chose, if it did. Returns `inputs`.
    """
    if inputs.why:
        click.echo(choice_text(inputs), err=True)
    return inputs


def choice_text(inputs: Inputs) -> str:
    """The text that says which rules were chosen, and why."""
    return f"Without --rules, by `shardfx.auto.plan`: {inputs.why}"


def plan_of(options: PlanOptions, inputs: Inputs | None = None) -> ShardPlan:
    """Returns a plan of the model by the rules, and of its optimizer's state if the
    options name an optimizer.

    If MODEL names a stored plan, and the options have no mesh and no rules, it is the
    stored plan. `inputs` are the parsed options, if they were parsed before. Raises
    `UsageError` if an argument is missing or invalid, or planning fails.
    """
    if inputs is None:
        inputs = say_choice(inputs_of(options))
    if inputs.model.plan is not None and not inputs.rules:
        return inputs.model.plan
    _require_known(options, inputs)
    made_plan = calling(
        "planning", lambda: plan(inputs.model.tree, inputs.mesh, **inputs.rules)
    )
    if options.optimizer is None:
        return made_plan
    init = load_optimizer(options.optimizer)
    state = calling(f"`{options.optimizer}`", lambda: follow(init, made_plan))
    return ShardPlan.join(model=made_plan, optimizer=state)


def findings_of(options: PlanOptions, inputs: Inputs) -> Findings:
    """Returns the findings of `lint` for the model, and for the state of its optimizer
    if the options name one.
    """
    with working("checking the rules"):
        if inputs.model.plan is not None and not inputs.rules:
            return lint(inputs.model.plan)
        findings = lint(inputs.model.tree, inputs.mesh, **inputs.rules)
        if options.optimizer is None or findings.worst("error"):
            return findings
        # `findings` has those about the model already.
        all_findings = list(findings)
        for finding in lint(plan_of(options, inputs)):
            if finding.code == "optimizer-state":
                all_findings.append(finding)
        return Findings(all_findings)


# The default mesh axes of the strategies for published models.
_STRATEGY_AXES = ("data", "fsdp", "tensor", "expert")


def _require_known(options: PlanOptions, inputs: Inputs) -> None:
    """Raises `UsageError` if the rules are a strategy, such as "fsdp_tp", and the mesh
    has an unknown axis.

    Known axes are those that the strategy uses, and `data`, `fsdp`, `tensor` and
    `expert`. Any other is probably misspelled.
    """
    strategy = (options.rules or "").partition(":")[0]
    if strategy not in presets.models.strategies():
        return
    axes_of_rules = inputs.rules["paths"].mesh_axes
    known_axes = tuple(dict.fromkeys((*axes_of_rules, *_STRATEGY_AXES)))
    for axis, size in inputs.mesh.shape.items():
        if size > 1 and axis not in known_axes:
            hint = near(axis, known_axes)
            if not hint:
                example = f"{options.rules}:{axes_of_rules[-1]}={axis}"
                hint = f"; for another name write --rules {example}"
            raise UsageError(
                f"--mesh {options.mesh} has the axis {axis!r}, and --rules"
                f" {options.rules} uses {', '.join(axes_of_rules)}{hint}"
            )


def _mesh_of_options(options: PlanOptions, device_count: int | None) -> MeshSpec:
    """Returns the mesh of --mesh, in which `device_count`, the number of devices of
    --target (`None` without it), or else --devices fills a size of -1. Raises
    `UsageError` if nothing fills it, or if both numbers differ.
    """
    mesh = MeshSpec.parse(options.mesh or "")
    if device_count is not None and options.devices not in (None, device_count):
        raise UsageError(
            f"--target {options.target} has {device_count} devices, not"
            f" {options.devices}; leave out --devices"
        )
    count = device_count or options.devices
    if count is None and -1 in mesh.axis_sizes:
        raise UsageError(
            f"--mesh {options.mesh} has a size of -1; say what fills it with --devices"
            " N or --target"
        )
    if count is None:
        return mesh
    return mesh.fit(count)
