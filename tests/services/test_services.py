"""What all services have in common."""

from __future__ import annotations

import subprocess
import sys

import pytest

from commands import IMPORTING
from processes import ROOT
from tools.command_line import COMMANDS, SERVICES

FILES = sorted(file.stem for file in (ROOT / "services").glob("[a-z]*.py"))


def test_services_are_commands() -> None:
    """`sbus help` lists them, and the shells complete them."""
    assert {*SERVICES} <= {*COMMANDS}


@pytest.mark.parametrize("name", FILES)
def test_a_light_python_is_enough(name: str) -> None:
    """OpenWrt's has no logging, which concurrent.futures needs."""
    program = f"import sys, services.{name}; print('logging' in sys.modules)"
    command = [sys.executable, "-c", program]
    output = subprocess.check_output(command, env=IMPORTING, text=True)
    assert output == "False\n"
