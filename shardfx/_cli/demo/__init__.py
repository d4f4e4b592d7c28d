"""The demo: a byte-level transformer, trained under a plan and again without one, on the same batches.

It may import the public names of `shardfx` and optax. It never uses a private name, since it shows what users can do.
"""

from .train import Run as Run, default_mesh as default_mesh, show as show
