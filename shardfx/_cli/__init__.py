"""`python -m shardfx`: commands that plan, explain, check and compare, for models and meshes that need not be on this
machine.

It may import all of shardfx, and click and rich, which the extra `cli` installs. `entry.py` and this file import
neither. It never plans by itself: it parses arguments, calls the library, and prints. A user's mistake gives one line
on stderr. Each command is called a verb; the verbs are in `verbs/`.
"""

from .entry import main as main
