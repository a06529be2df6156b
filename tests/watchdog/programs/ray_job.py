"""A Ray job whose actor starts an HTTP engine child and drives it for ever, as Miles' rollout manager does.

ray_job.py PORT    (0: an actor that only sleeps)
"""

import http.client
import json
import os
import subprocess
import sys
import time

import ray

PORT = int(sys.argv[1])
ENGINE = os.environ.get("ZEROGAP_TEST_ENGINE", "")


@ray.remote
class RolloutManager:
    def __init__(self, port):
        self.port = port
        self.engine = subprocess.Popen([sys.executable, ENGINE, "sglang", str(port)]) if port else None
        print(f"ENGINE pid={self.engine.pid if self.engine else 0}", flush=True)

    def post(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("POST", "/generate", json.dumps({"text": "1"}))
            return connection.getresponse().read()
        finally:
            connection.close()

    def run(self):
        step, attempt = 0, 0
        while True:
            if self.engine is None:
                time.sleep(0.5)
                continue
            try:
                self.post()
                if attempt or step == 0:
                    print("first answer", flush=True)
                step, attempt = step + 1, 0
                if step % 20 == 0:
                    print(f"rollout {step // 20}: {{'rollout/raw_reward': 0.25}}", flush=True)
                time.sleep(0.1)
            except Exception as error:  # the handle of the child is never looked at
                attempt += 1
                print(f"Error: {error}, retrying... (attempt {attempt}/60, url=x, response=None)", flush=True)
                time.sleep(0.5)


ray.init()
manager = RolloutManager.remote(PORT)
print("driver up", flush=True)
ray.get(manager.run.remote())
