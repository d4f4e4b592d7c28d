"""Maps between real trees: Hugging Face's checkpoints, models that scan over layers, MaxText's tree, and inference
engines' trees.

It may import the maps between trees and the ground values. It never reads a file: a layout is a value with a line for
each kind of weight, two of them make a map, and a map is a value too.
"""

from ._hugging_face import hugging_face as hugging_face
from ._layout import TreeLayout as TreeLayout
from ._maxtext import maxtext as maxtext
from ._places import Counted as Counted, Fused as Fused, Scaled as Scaled
from ._targets import engine as engine, stacked as stacked
