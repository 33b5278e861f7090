"""A process that runs commands of the pipeline, one after another.

To start Java, and for it to get up to speed, takes longer than a command.
The fixture is in pipeline_session.py, so that all modules share the process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from pipeline_bed import PATHS, plain_environment

# Runs each line of its input as a command, as a user would: all is said on
# the files to which its output and errors go, and then its status on fd 3
SCRIPT = f"""
{PATHS}
import json, os, signal
from sbus_spark import main, table
table.SEGMENTS_PER_BATCH, table.BATCHES_MAX = 1, 3
table.FOLLOW_SECONDS = 0.1
for line in sys.stdin:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = main(json.loads(line))
    sys.stdout.flush()
    os.write(int(sys.argv[1]), b"%d\\n" % status)
"""
SECONDS_MAX = 90


class Console:
    """The process; it is started when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"  # where Spark keeps what it needs
        self._of_java = folder / "java"  # what it leaves if it is killed
        self.scratch.mkdir()
        self._of_java.mkdir()
        self._files = [folder / "output", folder / "errors"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: object) -> None:
        """Begin a command."""
        if not self._process:
            self._begin()
        assert self._process and self._process.stdin
        self._said = [path.stat().st_size for path in self._files]
        line = json.dumps(list(map(str, arguments))) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def _begin(self) -> None:
        environment = plain_environment() | {
            "SPARK_LOCAL_DIRS": str(self.scratch),
            "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={self._of_java}",
        }
        self._status, status = os.pipe()
        output, errors = (path.open("ab") for path in self._files)
        with output, errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(status)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                pass_fds=[status],
                start_new_session=True,
            )
        os.close(status)

    def signal(self, number: int) -> None:
        """Send the process, and not Java, a signal."""
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and Java in the middle of a command."""
        assert self._process and not self._is_told(0)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._end()

    def finish(self) -> tuple[int, str, str]:
        """Return the status of the command, its output and its errors."""
        assert self._is_told(SECONDS_MAX), "it goes on"
        status = int(os.read(self._status, 9))
        return status, *self._new_text()

    def _is_told(self, seconds: float) -> bool:
        return bool(select.select([self._status], [], [], seconds)[0])

    def _new_text(self) -> tuple[str, str]:
        output, errors = (
            path.read_bytes()[start:].decode()
            for path, start in zip(self._files, self._said)
        )
        return output, errors

    def _end(self) -> int:
        assert self._process and self._process.stdin
        with self._process:
            self._process.stdin.close()
        os.close(self._status)
        status, self._process = self._process.returncode, None
        return status

    def close(self) -> None:
        """Let the process end, which it does quietly."""
        if self._process:
            self._said = [path.stat().st_size for path in self._files]
            assert self._end() == 0
            assert self._new_text() == ("", "")
