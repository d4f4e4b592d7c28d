"""`shardfx demo`: trains a small transformer under a plan, and again without one."""

import click
import jax
from jax.sharding import AxisType

from shardfx import MeshSpec

from .._screen import terminal_width, verb
from .._usage import UsageError, calling


_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@verb(
    examples=(
        "shardfx demo --cpu-devices 4 --steps 3 --batch 4",
        (
            "shardfx demo --cpu-devices 8 --mesh data=2,fsdp=2,tensor=2 --axis-types"
            " explicit --steps 3 --batch 4"
        ),
    ),
    exits="0; 1 if the two loss curves differ",
)
@click.option(
    "--cpu-devices",
    type=click.IntRange(1),
    help=(
        "Emulate N CPU devices, even where there are accelerators; by default the"
        " accelerators that there are, else 8 emulated CPU devices."
    ),
)
@click.option(
    "--mesh",
    metavar="MESH",
    help="Of all devices, as in data=2,fsdp=2,tensor=2; one size may be -1.",
)
@click.option(
    "--axis-types",
    type=click.Choice(list(_AXIS_TYPES)),
    default="auto",
    help="Of the mesh.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Training steps.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Texts in a batch.",
)
def demo(
    cpu_devices: int | None,
    mesh: str | None,
    axis_types: str,
    steps: int,
    batch: int,
) -> int:
    """Train a small transformer under a plan, and again without one.

    Trains a byte-level transformer on the source files of Python's standard library
    over a mesh of data x fsdp x tensor, then again on one device without any plan.
    Prints the plan, the progress and both loss curves. Needs the extra `demo`: pip
    install 'shardfx[demo]'.
    """
    # JAX reads both settings when it starts a backend, which has not happened yet.
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices or 8)
    try:
        from ..demo import Run, default_mesh, show
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("shardfx"):
            raise
        raise UsageError(
            f"the demo needs {error.name}; install it with: pip install 'shardfx[demo]'"
        ) from error
    devices = jax.devices()
    types = _AXIS_TYPES[axis_types]
    run = Run(steps=steps, batch_size=batch)
    spec = default_mesh(len(devices), types)
    if mesh is not None:
        spec = calling(
            "reading --mesh",
            lambda: MeshSpec.parse(mesh, axis_types=types).fit(len(devices)),
        )
    if show(spec, devices, run, width=terminal_width()):
        return 0
    return 1
