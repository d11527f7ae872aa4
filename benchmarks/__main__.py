"""Step times beside other packages, in one pass.

python -m benchmarks [--key=value ...] [--record=NAME]    as `python -m experiments run steptime`
python -m benchmarks --smoke                              a tiny version, in seconds

pip install particlax[peers]                     # BlackJAX and NumPyro
pip install torch==2.13.0 pyro-ppl               # Pyro; without a package its row says so
"""

import sys

from rich.console import Console

from experiments.__main__ import run
from experiments.fetching import DatasetError


def main(arguments: list[str]) -> None:
    """Do the study and print its table."""
    try:
        run("steptime", arguments, Console())
    except DatasetError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
