"""`StepElsewhere`, what a pickled result has in place of its step."""

from typing import NoReturn

from .._ground.errors import ProgramError


class StepElsewhere:
    """The step of a result that was pickled. JAX's traces stay in their process, and so
    does all that is read of them later.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python asks for these, and takes this answer for no.
            raise AttributeError(name)
        raise ProgramError(
            "the result was pickled without its step, since JAX's traces stay in their"
            " process; read what needs the step, such as `fit.changes` and"
            " `fit.peak_arrays`, before it is pickled, or ask again here."
        )
