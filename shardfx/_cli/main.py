"""`python -m shardfx`: plan a model for a mesh that is not here, or train one under a plan."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import AxisType

from .._plan.follow import follow
from .._plan.planner import plan
from .._plan.report import report
from .._plan.shard_plan import ShardPlan
from ..topology._mesh import MeshSpec
from ._load import load_model, load_optimizer, load_rules, preset_names
from ._slice import order_text, parse_slice
from ._usage import UsageError, calling, encodable, in_flags, shown
from ._values import literals, whole_number


_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_DEMO = """\
Trains a byte-level transformer on the source files of Python's standard library over a mesh of
data x fsdp x tensor, then again on one device without any plan. Prints the plan, the progress and both
loss curves. Needs the extra `demo`: pip install 'shardfx[demo]'.
"""
_PLAN = """\
Prints how every array of a model is sharded on a mesh, and why. Allocates nothing and needs no device:
the mesh need not exist here.
"""
_EXAMPLES = """\
examples:
  shardfx plan my_model:make --mesh data=64,fsdp=16,tensor=8 --rules my_model:RULES
  shardfx plan my_model:make --mesh fsdp=16 --rules 'norm|bias->replicate, .*->fsdp(fsdp)'
  shardfx plan my_model:make --kwargs 'depth=4, width=1024' --mesh fsdp=16 --rules my_model:RULES
  shardfx plan my_model:make --mesh data=-1,fsdp=16 --rules my_model:RULES --target tpu:v5p:8x8x8
  shardfx plan ./model-dir --mesh fsdp=8,tensor=4 --preset llama --json plan.json
"""
_CODES = "Exit code: 0; 2 for bad input, after one line on stderr"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `arguments`: what follows the program's name; `sys.argv` by default.

    **Returns:**

    The exit code: 0; 1 if the demo's losses differ; 2 for bad input, after one line on stderr.
    """
    flags = _parser().parse_args(arguments)
    try:
        code = flags.run(flags)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(shown(f"shardfx {flags.command}: error: {error}", sys.stderr.encoding), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, `head` for example, has what it wanted; the interpreter must not flush to it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others here."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, shown(f"{self.prog}: error: {message}; see {self.prog} --help", sys.stderr.encoding) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shardfx", description="Sharding plans as plain data, for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small transformer under a plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DEMO,
        epilog=f"{_CODES}; 1 if the two loss curves differ.",
    )
    parser.set_defaults(run=_demo)
    add = parser.add_argument
    add(
        "--cpu-devices",
        type=_positive,
        metavar="N",
        help="emulate N CPU devices, even where there are accelerators "
        "(default: the accelerators that there are, else 8 emulated CPU devices)",
    )
    add("--mesh", metavar="MESH", help="of all devices, as in data=2,fsdp=2,tensor=2; one size may be -1")
    add("--axis-types", choices=tuple(_AXIS_TYPES), default="auto", help="of the mesh (default: auto)")
    add("--steps", type=_positive, default=100, metavar="N", help="training steps (default: 100)")
    add("--batch", type=_positive, default=16, metavar="N", help="texts in a batch (default: 16)")
    add("--seed", type=_number, default=0, metavar="N", help="of weights and batches (default: 0)")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="print the plan of your own model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_PLAN,
        epilog=f"{_EXAMPLES}\n{_CODES}.",
    )
    parser.set_defaults(run=_plan)
    add = parser.add_argument
    add(
        "model",
        metavar="MODULE:CALLABLE",
        help="makes the model, without arguments, with `key` alone or with those of --kwargs (traced, not run); "
        "or a tree of arrays or ShapeDtypeStructs; or a directory with a checkpoint, of which only headers are read",
    )
    add("--mesh", required=True, metavar="MESH", help="as in data=64,fsdp=16,tensor=8; one size may be -1")
    rules = parser.add_mutually_exclusive_group(required=True).add_argument
    rules(
        "--rules",
        metavar="MODULE:NAME",
        help="PathRules, AxisRules, a pair of both, or a function that makes them; "
        "or path rules as a text, 'attention|mlp->fsdp.tensor, .*->fsdp(fsdp)'",
    )
    rules(
        "--preset",
        metavar="NAME",
        help=f"rules that come with shardfx, as in llama:head_dim=64: {', '.join(preset_names())}",
    )
    add("--kwargs", metavar="NAME=VALUE,...", help="arguments for the model's callable, as in 'depth=4, width=1024'")
    add("--optimizer", metavar="MODULE:NAME", help="plan its state too, as in optax:adamw or my_model:OPTIMIZER")
    add("--mode", metavar="MODE", help="in which AxisRules are read, as in decode")
    add("--target", metavar="tpu:KIND:AxBxC", help="a TPU slice, as in tpu:v5p:8x8x8, that fills a size of -1")
    add("--devices", type=_positive, metavar="N", help="how many devices fill a size of -1")
    add("--min-bytes", type=_number, default=0, metavar="N", help="replicate arrays of fewer bytes")
    add("--unmatched", choices=("raise", "replicate"), default="raise", help="arrays without a rule (default: raise)")
    add("--unused", choices=("raise", "allow"), default="raise", help="rules that never apply (default: raise)")
    add("--strict", action="store_true", help="fail where an array cannot be sharded as its rule asks")
    add("--refine", action="store_true", help="split mesh axes of which a dimension can take a part")
    add("--width", type=_positive, metavar="N", help="columns of text (default: the terminal's, else no limit)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the plan as JSON; to stdout instead of the table")


def _demo(flags: argparse.Namespace) -> int:
    # Both are read when JAX starts a backend, which nothing has done yet.
    if flags.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.cpu_devices or 8)
    try:
        from .demo import Run, default_mesh, show
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("shardfx"):
            raise
        raise UsageError(f"the demo needs {error.name}; install it with: pip install 'shardfx[demo]'") from error
    devices, axis_types = jax.devices(), _AXIS_TYPES[flags.axis_types]
    run = Run(steps=flags.steps, batch_size=flags.batch, seed=flags.seed)
    mesh = default_mesh(len(devices), axis_types)
    if flags.mesh is not None:
        mesh = calling("reading --mesh", lambda: MeshSpec.parse(flags.mesh, axis_types=axis_types).fit(len(devices)))
    return show(mesh, devices, run, width=_terminal_width())


def _plan(flags: argparse.Namespace) -> int:
    # As for `python -m`, the user's modules are those of the current directory; a console script lacks it.
    sys.path.insert(0, os.getcwd())
    target = None if flags.target is None else parse_slice(flags.target)
    mesh = calling("reading --mesh", lambda: _mesh(flags, None if target is None else len(target.devices)))
    paths, axes = load_rules(flags.rules, flags.preset)
    tree = load_model(flags.model, None if flags.kwargs is None else literals(flags.kwargs, "kwargs"))
    made = calling(
        "planning",
        lambda: plan(
            tree,
            mesh,
            paths=paths,
            axes=axes,
            mode=flags.mode,
            min_bytes=flags.min_bytes,
            unmatched=flags.unmatched,
            unused=flags.unused,
            strict=flags.strict,
            refine=flags.refine,
        ),
    )
    if flags.optimizer is not None:
        init = load_optimizer(flags.optimizer)
        state = calling(f"`{flags.optimizer}`", lambda: follow(init, made))
        made = ShardPlan.join(model=made, optimizer=state)
    if flags.json == "-":
        print(calling("writing the plan", made.to_json))
        return 0
    text = in_flags(report(made, width=flags.width or _terminal_width()))
    print(encodable(text, sys.stdout.encoding))
    if target is not None:
        print(f"\n{order_text(target, mesh)}")
    if flags.json is not None:
        calling(f"writing {flags.json!r}", lambda: _write(made, flags.json))
    return 0


def _mesh(flags: argparse.Namespace, device_count: int | None) -> MeshSpec:
    mesh = MeshSpec.parse(flags.mesh)
    if device_count is not None and flags.devices not in (None, device_count):
        raise UsageError(
            f"--target {flags.target} has {device_count} devices, not {flags.devices}; leave out --devices"
        )
    count = device_count or flags.devices
    if count is None and -1 in mesh.axis_sizes:
        raise UsageError(f"--mesh {flags.mesh} has a size of -1; say what fills it with --devices N or --target")
    return mesh if count is None else mesh.fit(count)


def _write(made: ShardPlan, file: str) -> None:
    with open(file, "w") as opened:
        opened.write(made.to_json() + "\n")


def _number(text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no whole number of at most 18 digits")
    return number


def _positive(text: str) -> int:
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no positive integer of at most 18 digits")
    return number


def _terminal_width() -> int | None:
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
