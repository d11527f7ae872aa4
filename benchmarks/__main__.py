"""How long a step takes beside other packages and beside the machine's limit.

python -m benchmarks                               all of them: clouds, steptime, interaction
python -m benchmarks NAME [--key=value ...]        one, as `python -m experiments run NAME`; on a GPU add --record=study-gpu
python -m benchmarks [NAME] --smoke                tiny versions, in seconds

clouds         SVGD, M = 2000 and 8000 in two dimensions, exact median: step time and peak memory
steptime       SVGD, logistic regression on Covertype, M = 100, batches of 50 (--data=shaped needs no download)
interaction    784-400-400-10, M = 20, RMSprop: each method over networks that do not interact

Everything runs on the device that JAX finds. Packages come from `pip install particlax[peers]` (BlackJAX and NumPyro) and
`pip install torch==2.13.0 pyro-ppl` (Pyro); without a package its row says so.
"""

import os
import sys

from rich.console import Console

from experiments.__main__ import run
from experiments.fetching import DatasetError

NAMES = ("clouds", "steptime", "interaction")


def main(arguments: list[str]) -> None:
    """Do the studies and print their tables."""
    # Entrants have processes of their own; none may take all of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments[:1] in (["-h"], ["--help"]):
        raise SystemExit(__doc__)
    one = arguments and not arguments[0].startswith("--")
    names, options = (arguments[:1], arguments[1:]) if one else (NAMES, arguments)
    try:
        for name in names:
            run(name, options, Console())
    except DatasetError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
