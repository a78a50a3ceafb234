"""Functions for programs: a call that does not fit the signature is refused in one sentence."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from playground.errors import Refusal
from playground.request_limits import quoted

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def refuses_unknown_arguments(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """The function, which raises Refusal instead of TypeError for arguments that it does not have or lacks, and names
    the nearest.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        for name in kwargs:
            if name not in signature.parameters:
                near = get_close_matches(name, signature.parameters, 1)
                hint = f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(signature.parameters)}."
                raise Refusal(f"playground.{function.__name__} has no argument {quoted(name)}; {hint}", name)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as reason:
            raise Refusal(
                f"playground.{function.__name__} cannot be called so ({reason}): its arguments are "
                f"{', '.join(signature.parameters)}, by name after the first two."
            ) from None
        return function(*args, **kwargs)

    return checked
