"""The command line."""

from __future__ import annotations

import argparse
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

import sbus_client

from .console import explain, note
from .options import option_parser

WITHOUT_SPARK = {"compact", "expire", "replay", "show", "status"}


def run(arguments: Sequence[str] | None) -> int:
    """Do what the command line asks for; return the exit status.

    0 is success, 1 that something was found, 2 an error.
    """
    options = argparse.Namespace(verbose=False, table="")
    try:
        option_parser().parse_args(arguments, options)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except Exception as error:
        if options.verbose:
            traceback.print_exc()
        if not isinstance(error, BrokenPipeError):  # its reader had enough
            note(explain(error, options.table))
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
        try:
            sys.stdout.flush()
        except OSError:
            sbus_client.discard_output(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "pyspark.sql" in sys.modules:
            from pyspark.sql import SparkSession

            with contextlib.suppress(Exception):  # a signal breaks Spark
                if spark := SparkSession.getActiveSession():
                    spark.stop()
