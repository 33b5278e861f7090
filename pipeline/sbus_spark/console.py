"""Console: what is said to a user, and to systemd, beside the output."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any

from sbus_client import SbusError

from .inputs import PipelineError, printable

# In what Spark says of an error: one of ours, or its innermost cause
CAUSES = (
    r"(?:InputError|PipelineError): (.*)",
    r"^(?:\w*Error|\w+\.[\w.$]+|Caused by): (.*)",
)
# What to do about it, by what stands in the text
REMEDIES = {
    "No space left": "make room, and run this again: nothing is lost",
    "OutOfMemoryError|Java heap space": "give Spark more memory than 2g, with"
    " PYSPARK_SUBMIT_ARGS='--driver-memory 8g pyspark-shell'",
    "FILE_NOT_EXIST": "a compaction has removed it: run this again",
    "JAVA_GATEWAY_EXITED": "Java did not start: --verbose shows why",
    "append.?[oO]nly": "unset delta.appendOnly, which forbids to drop rows",
    "codec can't encode": "set PYTHONUTF8=1, or use --json",
    "Failed to open local file": "if the file has gone, run this again",
    "Parquet magic|deserialize thrift|not a parquet": "a file of the table is"
    " damaged: the README says how to repair it",
}


def note(text: str) -> None:
    """Say something beside the output.

    spark-submit merges our standard error with the output; its own it keeps.
    """
    line = f"sbus-spark: {printable(text)}"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.java_gateway import launch_gateway

        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        gateway.jvm.System.err.println(line)
    else:
        print(line, file=sys.stderr, flush=True)


def notify(state: str) -> None:
    """Say to systemd, if it has started this, how it goes."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        name = "\0" + address[1:] if address[0] == "@" else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), name)


def explain(error: Exception, table: str) -> str:
    """Return in a line what went wrong with a table, and what to do."""
    text = str(error) or repr(error)
    if isinstance(error, (PipelineError, SbusError)):
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install '.[spark]'"
    raised_in_task, causes = (re.findall(x, text, re.M) for x in CAUSES)
    if raised_in_task:
        return str(raised_in_task[-1])

    # Spark gives the plan of a query after the reason
    reason = [*text.splitlines()[:1], *causes][-1]
    if table not in reason:
        reason = f"{table}: {reason}"
    remedies = [REMEDIES[x] for x in REMEDIES if re.search(x, text)]
    return "; ".join([reason, *remedies, "--verbose shows all"][:2])
