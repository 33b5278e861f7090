"""The Spark session of the tests: a plugin, so that all modules share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import QUICK
from real_bus import RealBus
from sbus_client import Client


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SparkSession]:
    """Start Spark, once for all tests, on two cores."""
    folder = tmp_path_factory.mktemp("spark")
    own = {
        "PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-java-options"
        f" -Djava.io.tmpdir={folder} pyspark-shell",
        "SPARK_LOCAL_DIRS": str(folder),
        "TMPDIR": str(folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUICK, **own}.items():
            patch.setenv(name, value)
        try:
            session = sbus_spark.session("test")
        except sbus_spark.JavaError as error:
            pytest.skip(str(error))
        yield session
        session.stop()


@pytest.fixture
def hearer(tmp_path: Path) -> Iterator[Client]:
    """Return a client that hears all of a bus, and its own secrets."""
    with RealBus(tmp_path) as bus, Client(bus.path) as client:
        for pattern in ("", "!/cred////x"):
            client.subscribe(pattern)
        client.sync()
        yield client
