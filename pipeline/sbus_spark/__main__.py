"""Runs the command line.

    python3 pipeline/sbus_spark COMMAND...      in a checkout
    python3 -m sbus_spark COMMAND...            where it is installed
    spark-submit --py-files build/sbus_spark.zip \
pipeline/sbus_spark/__main__.py COMMAND...
"""

import os
import sys
from pathlib import Path

if not __package__:  # run by its path
    here = Path(__file__).resolve().parent
    # Python has put this folder first, whose modules are no top-level ones
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else --py-files has all
        sys.path[:0] = [str(here.parent), str(here.parents[1])]

from sbus_spark import main

if __name__ == "__main__":
    sys.exit(main())
