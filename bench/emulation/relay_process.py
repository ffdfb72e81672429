"""The process that relays frames between emulated nodes; started by `gradwire.bench.emulation.relay`, never imported.

It runs with `python -I -S`, imports nothing of gradwire but the compiled module, whose path it is given, and answers
lines of JSON on stdin with lines of JSON on stdout: first how the network is, then `{"limit": [node, bits per second]}`
or `{"counts": true}`. It ends with stdin, or with status 1 and a reason on stderr where the kernel refuses.
"""

import contextlib
import importlib.util
import json
import os
import sys
import threading

_PRIORITY = -15
"""Nice value of the relay: -20 is first, 19 last."""


def _load(path: str):  # type: ignore[no-untyped-def]  # the module has stubs under its own name only
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None and spec.loader is not None  # the loader goes by the suffix
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Relays packets and answers requests until stdin ends."""
    if os.geteuid() == 0:
        # Before the ranks whose packets it carries, which may keep every core busy. In a user namespace the kernel
        # refuses, and packets are late by as long as the relay waits for a core.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    relay = _load(sys.argv[1]).Relay(**json.loads(sys.stdin.readline()))

    def run() -> None:
        try:
            relay.run()
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)  # the main thread waits for stdin and would not notice

    thread = threading.Thread(target=run, name="relay")
    thread.start()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "limit" in asked:
            relay.limit(*asked["limit"])
        print(json.dumps({"counts": relay.counts(), "overrun": relay.overrun()}), flush=True)
    relay.stop()
    thread.join()


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, ValueError, AttributeError) as error:
        sys.exit(f"{error}")
