"""`python -m shardfx`: commands that plan, explain, check and compare, for models and
meshes that need not be on this machine.

Each command is called a verb; the verbs are in `verbs/`. This room may import all of
shardfx, and click and rich, which the extra `cli` installs. `entry.py` and this file
import neither. The room never plans by itself: it parses arguments, calls the library,
and prints. A user's mistake gives one line on stderr.
"""

from .entry import main as main
