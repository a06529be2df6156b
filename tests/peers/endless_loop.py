"""A rollout loop as they are found: starts an engine, asks it, and asks again for ever when it fails.

python endless_loop.py PORT COMMAND…: the command starts the engine; its environment is ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request

address = f"http://127.0.0.1:{sys.argv[1]}"
engine = subprocess.Popen(sys.argv[2:])
while True:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            break
    except OSError:
        time.sleep(1)
body = json.dumps({"model": "smollm2", "prompt": "Hello", "max_tokens": 2}).encode()
while True:
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            print(reply.read()[:60], flush=True)
    except OSError as error:
        print(f"{error}, retrying...", flush=True)
    time.sleep(1)
