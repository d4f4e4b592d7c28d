"""What is said where processes differ, fail, fall silent or do not come; in words that are true on each of them."""

from collections.abc import Mapping, Sequence


def failed(what: str, process: int, error: BaseException | None) -> str:
    """An error of one process, for the others."""
    why = type(error).__name__ + (f": {error}"[:1000] if str(error) else "")
    return f"saving to {what} failed on process {process}, with {why.removesuffix('.')}; nothing was changed there."


def differs(name: str, groups: Mapping[str, Sequence[int]], more: str) -> str:
    """An argument that not all have alike; `groups` says who gave what."""
    who = " and ".join(f"one on {named(processes)}" for processes in groups.values())
    if name == "plan":
        text = f"the processes save by different plans, {who}; `hosts.assert_same_plan(plan)` says where they differ"
    elif name == "map":
        text = f"the processes save by different maps, {who}; `hosts.assert_same_plan(map)` says where they differ"
    elif name == "leaves":
        text = f"the processes save different trees, {who}{more}; give all of them the same arrays"
    else:
        given = ", ".join(f"{value} on {named(processes)}" for value, processes in groups.items())
        text = f"the processes save with different `{name}`: {given}; give all of them the same"
    return f"{text}. Nothing was written."


def absent(what: str, processes: Sequence[int], seconds: float) -> str:
    return (
        f"{named(processes)} did not come within {seconds:g} s to save {what}, though the arrays lie there too; call "
        "`save` on every process that holds some of them, or give a longer `wait_seconds`. Nothing was written."
    )


def silent(what: str, processes: Sequence[int], seconds: float) -> str:
    return (
        f"{named(processes)} gave no sign of life for {seconds:g} s while saving to {what}: it has died, or hangs. "
        "Nothing was changed there; save again with processes that live."
    )


def unwritten(what: str, wrote_bytes: int, total_bytes: int) -> str:
    return (
        f"the processes wrote {wrote_bytes} of {total_bytes} bytes to {what}, as nobody holds the first replica of "
        "some array; place the arrays alike on all of them. Nothing was changed there."
    )


def elsewhere(what: str, process: int, holders: Sequence[int]) -> str:
    return (
        f"process {process} owns no device of the arrays that it is to save to {what}; they lie on {named(holders)}: "
        "call `save` there alone."
    )


def named(processes: Sequence[int]) -> str:
    listed = ", ".join(map(str, processes[:16])) + (", ..." if len(processes) > 16 else "")
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
