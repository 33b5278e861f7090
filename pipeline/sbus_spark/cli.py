"""The command line."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Sequence
from typing import cast

from .console import explain, note
from .options import option_parser

WITHOUT_SPARK = {"compact", "expire", "replay", "show", "status"}


def run(arguments: Sequence[str] | None) -> int:
    """Do what the command line asks for; return the exit status.

    0 is success, 1 that something was found, 2 an error.
    """
    options = option_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # as of `show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if options.verbose:
            traceback.print_exc()
        note(explain(error, getattr(options, "table", "")))
        return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 130 if interrupted."""
    os.umask(0o077)  # what was recorded may be private
    logging.disable()  # what goes wrong is raised as well
    warnings.simplefilter("ignore")
    words = sys.argv[1:] if arguments is None else arguments
    if WITHOUT_SPARK.intersection(words[:1]):
        # PyArrow would import pandas, which takes as long as all else.  It
        # does without one that is too old
        pandas = types.SimpleNamespace(__version__="0")
        sys.modules.setdefault("pandas", cast(types.ModuleType, pandas))
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "pyspark.sql" in sys.modules:
            from pyspark.sql import SparkSession

            with contextlib.suppress(Exception):  # a signal breaks Spark
                if spark := SparkSession.getActiveSession():
                    spark.stop()
