"""The memory of one device while it runs a partitioned program.

The room may import the text of programs and the ground values. It never compiles and
never needs a mesh, since a partitioned program has the shapes of one device.
"""

from .memory import device_memory as device_memory
