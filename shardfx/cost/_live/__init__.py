"""The bytes that one device holds while it runs a partitioned program.

It may import the text of programs and the ground values. It never compiles and never needs a mesh, since a partitioned
program has the shapes of one device.
"""

from .held import Held as Held, HeldArray as HeldArray, held as held
