"""A trainer that drives a real engine through the phases of an RL run and, like Miles, retries for ever.

    driver.py KIND PORT [--hold PHASE] [--steps N] [--start-delay S]

With ``--hold`` it does two whole steps and then stays in that phase until it is ended. It prints the engine's pid.
"""

import argparse
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("port", type=int)
parser.add_argument("--hold", default="")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--start-delay", default="0")
parser.add_argument("--external", action="store_true", help="the engine is somebody else's process")
options = parser.parse_args()
PATH = "/generate" if options.kind == "sglang" else "/v1/completions"
BODY = {"text": "1", "prompt": "1", "model": "tiny", "max_tokens": 1}


def say(text):
    print(text, flush=True)


engine = None
if not options.external:
    program = str(Path(__file__).with_name("engine.py"))
    engine = subprocess.Popen(
        [sys.executable, program, options.kind, str(options.port), "--start-delay", options.start_delay]
    )
    say(f"ENGINE pid={engine.pid}")


def request(path, body, timeout=2.0):
    connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise OSError(f"Server error '{answer.status} Service Unavailable'")
    finally:
        connection.close()


def generate():
    """One rollout request, repeated for ever; the handle of the engine's process is never looked at."""
    attempt = 0
    while True:
        try:
            return request(PATH, BODY)
        except Exception as error:
            attempt += 1
            say(
                f"http_utils.py:153 - Error: {error}, retrying... "
                f"(attempt {attempt}/60, url=http://127.0.0.1{PATH}, response=None)"
            )
            time.sleep(0.5)


def wait_ready():
    while True:
        try:
            return request(PATH, BODY)
        except Exception:
            time.sleep(0.2)


def phase(name, step, seconds=0.1):
    say(f"Timer {name} start")
    if options.hold == name and step >= 2:
        say(f"HOLDING {name}")
        seconds = 10_000
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if name == "rollout":
            generate()
        time.sleep(0.05)
    say(f"Timer {name} end (elapsed: {seconds}s)")


wait_ready()
say("Timer update_weights start")
say("Timer update_weights end (elapsed: 0.0s)")
for step in range(options.steps):
    phase("rollout", step)
    say(f"log_utils.py:123 - rollout {step}: {{'rollout/raw_reward': 0.25, 'rollout/log_probs': -0.5}}")
    phase("train", step)
    say(f"log_utils.py:542 - step {step}: {{'train/loss': 0.1, 'train/grad_norm': 1.0, 'train/step': {step}}}")
    phase("update_weights", step)
if engine is not None:
    engine.terminate()
say("RL trainer finished! (exit 0)")
