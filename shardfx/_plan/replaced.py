"""A plan's content with another target for some of its arrays."""

import re
from typing import Any

from .._ground.errors import RuleError, SpecError, UnmatchedError
from .._ground.reason import Code
from .._ground.tree import leaves_at
from .._rules.path_rules import PathRules
from .._rules.resolution import check_known
from .complaints import raise_errors
from .content import Content
from .correction import axes_of
from .decide import row_of
from .leaf import Row
from .requests import asked_by_target, skipping
from .single import check_absent


RULE = "replaced by hand"


def replaced(content: Content, where: str, target: Any) -> Content:
    """See `shardfx.ShardPlan.replace`."""
    ((_, checked),) = PathRules([(re.escape(where), target)]).rules
    is_array = [number >= 0 for number in content.index]
    paths = content.skeleton.paths
    chosen = leaves_at(where, paths, is_array, f"`replace({where!r}, ...)`: no array of the plan")
    rows, index, errors = list(content.rows), list(content.index), []
    for at in chosen:
        try:
            rows.append(_row(content, paths[at], content.rows[content.index[at]], checked))
        except (RuleError, SpecError, UnmatchedError) as error:
            errors.append((paths[at], error))
        index[at] = len(rows) - 1
    raise_errors(errors)
    return content.replaced(rows=rows, index=index)


def _row(content: Content, path: str, row: Row, target: Any) -> Row:
    mesh = content.mesh
    request = asked_by_target(target, path, row, RULE, content.axes, content.mode)
    if request.units is None and request.names is None:  # what may not be cut apart is so by any spec
        request = request._replace(units=row.units)
    whole = {dim for step in row.strategies for dim in step.skip}  # and what is whole is so by any strategy
    request = request._replace(strategies=skipping(request.strategies, whole))
    if request.names is not None and content.axes is not None:
        check_known(request.names, content.axes)
    made = row_of(request, row.shape, row.dtype, axes_of(mesh), 0, row.memory_kind)
    check_absent(made.reasons, mesh, content.axes)
    cut = [why for why in made.reasons if why.code is not Code.scalar]
    if content.strict and cut:
        raise SpecError(f"the plan is strict, and {target} would be cut down: {'; '.join(map(str, cut))}")
    return made
