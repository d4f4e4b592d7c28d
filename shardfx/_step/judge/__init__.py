"""The judge: proves that the program of one device, which XLA's SPMD partitioner made,
computes what the whole program computes, or says where it does not.

The judge reads both programs, and gives each value of the program of one device a type.
A type says, for each device, what its array holds:

- **Of which value.** The values of the whole program are numbered (`values.py`), so that
  equal expressions have equal numbers. An operation on one device makes the value that
  the whole program makes by the same operation of the same values (`forms.py`). So an
  exchanged operand or a changed constant is another value. Broadcasts and transposes are
  views, and have no numbers of their own.
- **Which box of it.** For each dimension of the array, a `Cut` says which elements each
  device holds (`cuts.py`): segments of the whole dimension, or nothing. Devices that
  hold tiles have one segment each. A shard with rows of its neighbours has several.
- **Which terms of a sum.** A product over a dimension that is cut leaves each device with
  the terms of its own part. A term is the set of the devices that have it. An all-reduce
  gives a term to all devices of a group, and must find it there once.

Each operation has a rule, from the types of its operands to that of its result:

| file | operations |
|---|---|
| `pointwise.py`, `masks.py` | operands must hold the same boxes; selects by masks |
| `views.py`, `local_reshapes.py` | broadcasts, transposes, reshapes |
| `pieces.py`, `concatenations.py` | slices, pads, reverses; concatenations |
| `updates.py` | updates |
| `products.py` | products, reductions |
| `convolutions.py`, `pools.py`, `windows.py` | convolutions and pools |
| `exchanges.py` | collectives |
| `gathers.py`, `scatters.py` | gathers and scatters, by dimensions of `indices.py` |
| `lookups.py` | the partitioner's idioms for gathers and scatters |
| `positions.py`, `bounds.py` | updates of one row at an index of a cut dimension |
| `choices.py` | reductions of several arrays, such as an argmax |
| `whole_operations.py` | sorts, and all that have no rule of their own |
| `sources.py` | constants, iotas, the device's number |
| `loops.py`, `conditionals.py` | loops and conditionals |
| `manual.py`, `manual_calls.py` | the bodies of `shard_map`s |

`rules.py` finds the rule of an opcode, and `matching.py` the operation of the whole
program that an operation computes. `elements.py` says what devices hold of an array
that has elements of others. `judge.py` goes through the program and compares the
results. `record.py` keeps what is judged, so that a reading that fails can be
forgotten; `origins.py` names the user's lines.

A rule that cannot follow an operation raises `Unjudged`, and nothing is said of what
reads its result. A rule whose operands cannot belong together raises `Wrong`; that is a
refutation only if a result of the program hangs on it. The program is proved if each of
its results is the whole program's, in the boxes of the result's sharding.

The package may import the readers of programs in its room, and the ground. It never runs
a program.
"""

from .judge import judged, judged_text
from .verdict import Refutation, UnjudgedOperation, Verdict
