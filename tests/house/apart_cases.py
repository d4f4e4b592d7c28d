"""Cases that a process of its own runs: a module that imports little, as the process
starts for each.
"""

from benchmarks._case import Finding
from benchmarks._runner import Options


def devices_there(options: Options) -> list[Finding]:
    facts = {"count": len(options.devices), "repeats": options.repeats}
    return [Finding("devices", lambda: facts)]
