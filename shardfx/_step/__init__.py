"""One step: a function and its arguments, traced once, and what compilers make of it without a device.

That is the program of one device, by XLA's own partitioner, and Shardy's factors for every operation. It may import the
ground values and meshes. It never runs a step, never needs the devices of a mesh, and never changes the user's process:
XLA is asked in a process of its own.
"""

from .graph import program_of as program_of
from .lowered import Parameter as Parameter
from .operations import Laid as Laid, Operation as Operation, Program as Program, Value as Value
from .partitioner import MOST_DEVICES as MOST_DEVICES, partitioned as partitioned
from .step import (
    Platform as Platform,
    Step as Step,
    argument_names as argument_names,
    step_of as step_of,
)
