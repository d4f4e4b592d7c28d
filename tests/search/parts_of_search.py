"""The parts of a search that its tests look into. No public function shows them without
compiling the candidates.
"""

from shardfx.auto._asked import search_options as search_options, trace as trace
from shardfx.auto._namer import named_classes as named_classes
from shardfx.auto._programs import LoweredStep as LoweredStep
from shardfx.auto._space import (
    MODEL as MODEL,
    Space as Space,
    by_hand as by_hand,
    fastest as fastest,
)
