"""`python -m shardfx`: plan a model for a mesh that is not here, or train one under a plan.

It may import every room. It never plans by itself: it reads words, calls what the library exports, and prints. What a
user got wrong ends in one line on stderr.
"""

from .main import main as main
