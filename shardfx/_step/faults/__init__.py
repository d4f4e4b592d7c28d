"""The programs that XLA's partitioner is known to compute wrongly: a record for each
fault, and what its predicate says of a plan's arrays and of a step's operations.

The files of `records/` are data. Their first part is written by a person; the versions
of JAX that were run and the precision are written by `python -m
benchmarks.fault_records`, which runs the program of each fault.

It may import the operations of a step, and the ground. It never runs a program.
"""

from .predicates import ArrayCut, ShardedArray, matches_array, matches_operation
from .records import ArrayPredicate, Fault, OperationPredicate, Runs, fault_records
