"""`python -m shardfx`: commands that plan, explain, check and compare, for models and meshes that need not be on this
machine.

It may import every room, and click and rich, which come with the extra `cli`; `main.py` and this file do without them.
It never plans by itself: it reads words, calls what the library exports, and prints. What a user got wrong ends in one
line on stderr. The verbs are in `verbs/`.
"""

from .main import main as main
