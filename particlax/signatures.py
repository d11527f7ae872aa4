"""What the calls of modules take: inputs, random numbers, switches between training and prediction."""

import inspect
from typing import Any

from particlax.errors import OptionError

__all__ = ["called_with", "check_call", "maker"]

SWITCHES = {"train": True, "training": True, "is_training": True, "is_train": True}
SWITCHES |= {"deterministic": False, "inference": False, "use_running_average": False}
"""Keywords that switch a module between training and prediction, and what they are in training."""
ALIKE = dict.fromkeys(["train", "training", "dropout"], True)
ALIKE |= dict.fromkeys(["deterministic", "infer", "inference"], False)
ALIKE |= dict.fromkeys(["eval", "evaluate", "evaluation", "test", "testing"], False)
"""Words in names of other keywords that may do so too, and what such a keyword would be in training."""
SWITCH = "let its call take a switch, as (self, x, train), and hand it on to the layers that do"


def called_with(module: Any) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """What a call takes beside x: all names, those without default, the switches of prediction and training."""
    after_x = list(inspect.signature(module.__call__).parameters.values())[1:]
    after_x = [p for p in after_x if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in after_x]
    words = [{n: SWITCHES[n] == on for n in names if n in SWITCHES} for on in (False, True)]
    return names, [p.name for p in after_x if p.default is p.empty], words


def check_call(module: Any, wanted: list[str], given: Any, known: Any = ()) -> None:
    """Refuse a module whose call does not take what its layers need, needs what nobody gives, or has a switch that nobody sets.

    `given` are the words that it gets in training and in prediction, `known` those that it gets in one of them.
    """
    names, needs, words = called_with(module)
    places = inspect.signature(module.__call__).parameters
    takes = f"the call of {type(module).__name__} takes {[*places][:1] + names}"
    linen = type(module).__module__.startswith("flax.linen") or hasattr(module, "clone")
    if missing := [word for word in wanted if word not in names]:
        raise OptionError(f"{takes}, but its layers need {missing[0]!r}; expected that in it too")
    if unknown := [word for word in needs if word not in (*given, *words[0])]:
        do = "give it a default, wrap the module in one that takes x alone, or pass all inputs as one pytree x"
        if linen:
            do = "wrap it, or tell linen, as in train={'mode': 'fit'}, predict={'mode': 'use'}"
        elif words[0] == {}:
            do += f". A switch between training and prediction is called {', '.join(SWITCHES)}"
        raise OptionError(f"{takes}, but nothing gives {unknown[0]!r}; expected x alone: {do}")
    for name in [name for name in names if name not in (*given, *known, *words[0])]:
        parts = name.lower().split("_")
        about = [] if parts[0] in ("return", "output") else [ALIKE[p] for p in parts if p in ALIKE]
        if isinstance(places[name].default, bool) and about:
            modes = zip(("train", "predict"), (about[0], not about[0]), strict=True)
            told = ", ".join(f"{mode}={{{name!r}: {on}}}" for mode, on in modes)
            raise OptionError(
                f"{takes}, and {name!r}, which looks like a switch between training and prediction, would be {places[name].default} in both; "
                f"expected a name that says so, one of {', '.join(SWITCHES)}{f', or tell linen, as in {told}' * linen}. "
                "If it is none, wrap the module in one that takes x alone"
            )


def maker(make: Any, name: str) -> Any:
    """`make` as a function of what it takes by position, or by this name alone, as many classes do."""
    try:
        takes = inspect.signature(make.__init__ if isinstance(make, type) else make).parameters
    except (TypeError, ValueError):
        return make
    alone = name in takes and takes[name].kind is inspect.Parameter.KEYWORD_ONLY
    return (lambda value: make(**{name: value})) if alone else make
