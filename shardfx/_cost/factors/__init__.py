"""Which dimensions of an operation belong together, primitive by primitive.

It may import nothing of the package: shapes and parameters in, factors out. It never looks at a mesh.
"""

from .primitives import rule_of as rule_of
from .rule import (
    Dim as Dim,
    Dims as Dims,
    Kind as Kind,
    Rule as Rule,
    Sends as Sends,
    Shape as Shape,
    elementwise as elementwise,
)
