"""Layouts of weight trees, and maps between them: Hugging Face, models that scan over
layers, MaxText, vLLM.

It may import `_convert` and `_ground`. It never reads a checkpoint. A `TreeLayout` has
the path and the axes of each kind of weight. From two layouts of one model follows the
`TreeMap` between them.
"""

from ._entries import Counted as Counted, Fused as Fused, Scaled as Scaled
from ._hugging_face import hugging_face as hugging_face
from ._layout import TreeLayout as TreeLayout
from ._maxtext import maxtext as maxtext
from ._targets import engine as engine, stacked as stacked
