"""A step: a function and its arguments, traced once, and the programs that compilers
make of it without a device.

There are two such programs: the program of one device, made by XLA's own partitioner,
and a list of operations with Shardy's factors. The room may import the ground values,
plans and meshes. It never runs a step, never needs the devices of a mesh, and never
changes the user's process: XLA runs in a separate process.
"""

from .factors import Operation, Program, StepValue
from .graph import program_of
from .lowered import (
    ArraySharding,
    Dims,
    Frame,
    Module,
    Op,
    Parameter,
    applied,
    bytecode,
    carry_of,
    frames_of,
    is_library,
    lines_of,
    meshes,
    name_stacks,
    opened,
    operations,
    own_line,
    place_text,
)
from .partitioner import MOST_DEVICES, partitioned
from .step import EquinoxJitted, JaxJitted, Platform, Step, argument_names, step_of
