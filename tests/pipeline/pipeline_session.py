"""The Spark session of the tests: a plugin, so that all modules share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import PLAIN
from real_bus import RealBus
from sbus_client import Client


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SparkSession]:
    """Start Spark as the commands do for small inputs, once for all tests."""
    folder = str(tmp_path_factory.mktemp("spark"))
    options = f"{PLAIN['SPARK_SUBMIT_OPTS']} -Djava.io.tmpdir={folder}"
    places = {"SPARK_SUBMIT_OPTS": options, "SPARK_LOCAL_DIRS": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
        for name, value in {**PLAIN, **places, "TMPDIR": folder}.items():
            patch.setenv(name, value)
        try:
            session = sbus_spark.session("test", size=0)
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
