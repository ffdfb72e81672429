"""Signals under a watch: they are seen while the main thread stands, and end the process again behind it."""

import signal
import subprocess
import sys

CODE = """
import os, signal, sys
from gradwire.comms.watch.signals import END, REPORT, Signals

signals = Signals()
os.kill(os.getpid(), REPORT)
os.kill(os.getpid(), END)
print(sorted(signals.come()) == sorted([REPORT, END]), signals.come(), flush=True)
signals.close()
os.kill(os.getpid(), END)
print("still here")
"""


def test_signals_are_seen_and_end_the_process_once_the_watch_is_closed() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "True frozenset()\n"), ended.stderr
