"""The Spark session of the tests: a plugin, so that all modules share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sbus_spark
from pipeline_bed import PLAIN, places
from pipeline_without_spark import Bed, do_here
from real_bus import RealBus
from sbus_client import Client
from sbus_spark import intake


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start Spark as the commands do for small inputs, once for all tests."""
    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
        for name, value in (PLAIN | places(folder)).items():
            patch.setenv(name, value)
        try:
            session = sbus_spark.session("test", size=0)
        except sbus_spark.JavaError as error:
            pytest.skip(str(error))
        yield session
        session.stop()


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ingests do their tasks here."""
    monkeypatch.setattr(intake, "do_tasks", lambda _, *task: do_here(*task))


@pytest.fixture
def bed(without_spark: None, tmp_path: Path) -> Bed:
    """Return an empty capture and where its table is to be."""
    return Bed(tmp_path)


@pytest.fixture
def hearer(tmp_path: Path) -> Iterator[Client]:
    """Return a client that hears all of a bus, and its own secrets."""
    with RealBus(tmp_path) as bus, Client(bus.path) as client:
        for pattern in ("", "!/cred////x"):
            client.subscribe(pattern)
        client.sync()
        yield client
