"""A step: a function and its arguments, traced once, and the programs that compilers
make of it without a device.

There are two such programs: the program of one device, made by XLA's own partitioner,
and a list of operations with Shardy's factors. `hlo_text.py` is the one reader of the
text of programs, and `collectives.py` of their collectives. The room may import the ground values,
plans and meshes. It never runs a step, never needs the devices of a mesh, and never
changes the user's process: XLA runs in a separate process.
"""

from .callbacks import CALLBACKS
from .collectives import (
    KINDS,
    MOVING,
    Collective,
    DevicePositions,
    channel_of,
    collective_of,
    groups_of,
    is_transfer,
    slices_of,
    transfer_of,
)
from .evaluation import (
    CALLS,
    LOOPS,
    MARKED_CALLS,
    evaluated,
    manual_axes_of,
    retraced,
    struct_of,
    typed_struct_of,
)
from .explicit import (
    PlainStep,
    array_leaves,
    auto_twin,
    equation_over,
    explicit_mesh,
    on_auto_axes,
    over,
    over_ones,
    plain_step,
    structs_like,
    traced,
    unsharded,
    without_mesh,
)
from .factors import Operation, Program
from .faults import (
    ArrayCut,
    ArrayPredicate,
    Fault,
    fault_records,
    matches_array,
    matches_operation,
)
from .graph import program_of
from .hlo_text import (
    Array,
    HloModule,
    Instruction,
    Phase,
    Result,
    Tile,
    array_of,
    arrays_in,
    bytes_of,
    index_of,
    padded,
    parse_hlo,
    phase_of,
    result_of,
    root_of,
)
from .jaxprs import applied, carry_of, equations_in, opened
from .judge import (
    Refutation,
    UnjudgedOperation,
    Verdict,
    judged,
    judged_text,
)
from .libtpu import (
    TpuDumps,
    TpuSlice,
    TpuTexts,
    devices_of_slices,
    is_tupled,
    libtpu_path,
)
from .lowered import (
    ArraySharding,
    Dims,
    Frame,
    Module,
    Op,
    Parameter,
    bytecode,
    donating,
    frames_of,
    is_library,
    lines_of,
    meshes,
    name_stacks,
    operations,
    own_line,
    place_text,
)
from .partitioner import MOST_DEVICES, Programs
from .retracing import untraced
from .step import Platform, Step, platform_of
from .targets import LIBTPU_NAMES, Target, target_named
from .tracing import (
    argument_names,
    compiler_options_of,
    is_jitted,
    is_traced,
    mistakes_noted,
    step_of,
    unwrapped,
    with_copied_arrays,
    without_compiler_options,
)
