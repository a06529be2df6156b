"""The seed's run: an engine prints the user's two lines and dies, its parent retries for ever as Miles does."""

import subprocess
import sys
import time

ENGINE = """
import sys, time
print("[2026-10-17 21:03:03] Enable deterministic inference because of legacy rl_on_policy_target.", flush=True)
time.sleep(float(sys.argv[1]))
raise AssertionError(
    "FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`."
)
"""
URL = "http://10.0.0.1:3000/generate"
BODY = '{"error":{"type":"Service Unavailable","code":"no_available_workers","message":"No available workers"}}'

engine = subprocess.Popen([sys.executable, "-c", ENGINE, sys.argv[1] if len(sys.argv) > 1 else "1"])
for attempt in range(1, 10_000):
    time.sleep(0.5)
    if engine.poll() is not None:
        if attempt % 60 == 59:
            print(f"[rollout] Task raised exception: HTTPStatusError(503) for {URL}", flush=True)
        prefix = "(RolloutManager pid=1191) "
        print(
            f"{prefix}[2026-10-17 21:04:00] http_utils.py:153 - "
            f"Error: Server error '503 Service Unavailable' for url '{URL}'"
        )
        print(
            f"{prefix}For more information check: https://developer.mozilla.org/503, retrying... "
            f"(attempt {attempt}/60, url={URL}, response={BODY})",
            flush=True,
        )
