"""A plan's content with another target for some of its arrays."""

import difflib
import re
from typing import Any

from .._ground.errors import RuleError, SpecError, UnknownPathError, UnmatchedError
from .._ground.reason import Code
from .._rules.path_rules import PathRules
from .._rules.resolve import check_known
from .complaints import raise_errors
from .content import Content
from .correct import axes_of
from .decide import row_of
from .leaf import Row
from .requests import asked_by_target
from .single import check_absent


RULE = "replaced by hand"


def replaced(content: Content, where: str, target: Any) -> Content:
    """See `shardfx.ShardPlan.replace`."""
    ((_, checked),) = PathRules([(re.escape(where), target)]).rules
    chosen = _chosen(content, where)
    rows, index, errors = list(content.rows), list(content.index), []
    for at in chosen:
        try:
            rows.append(_row(content, content.paths[at], content.rows[content.index[at]], checked))
        except (RuleError, SpecError, UnmatchedError) as error:
            errors.append((content.paths[at], error))
        index[at] = len(rows) - 1
    raise_errors(errors)
    return content.replaced(rows=rows, index=index)


def _row(content: Content, path: str, row: Row, target: Any) -> Row:
    mesh = content.mesh
    request = asked_by_target(target, path, row, RULE, content.axes, content.mode)
    if request.units is None and request.names is None:  # what may not be cut apart is so by any spec
        request = request._replace(units=row.units)
    if request.names is not None and content.axes is not None:
        check_known(request.names, content.axes)
    made = row_of(request, row.shape, row.dtype, axes_of(mesh), 0, row.memory_kind)
    check_absent(made.reasons, mesh, content.axes)
    cut = [why for why in made.reasons if why.code is not Code.scalar]
    if content.strict and cut:
        raise SpecError(f"the plan is strict, and {target} would be cut down: {'; '.join(map(str, cut))}")
    return made


def _chosen(content: Content, where: str) -> list[int]:
    """The leaves at the path `where`, or else those whose path it matches as a regex."""
    arrays = [at for at, number in enumerate(content.index) if number >= 0]
    found = [at for at in arrays if content.paths[at] == where]
    if found:
        return found
    try:
        pattern = re.compile(where)
    except re.error as error:
        raise RuleError(f"{where!r} is no path of the plan, and no regex that compiles: {error}") from error
    found = [at for at in arrays if pattern.search(content.paths[at])]
    if not found:
        paths = [content.paths[at] for at in arrays]
        near = difflib.get_close_matches(where, paths, n=3, cutoff=0.5) or paths[:1]
        raise UnknownPathError(
            f"`replace({where!r}, ...)`: no array of the plan has this path, or one that the regex matches"
            + (f"; did you mean {' or '.join(f'`{path}`' for path in near)}?" if near else ".")
        )
    return found
