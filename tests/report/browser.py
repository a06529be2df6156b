"""A headless Chromium driven over its debugging pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. What the page logs or refuses to load is in ``problems``."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def place() -> None:
            os.dup2(to_read, 3, inheritable=True)
            os.dup2(to_write, 4, inheritable=True)

        # The child's ends must not be 3 or 4 themselves, or the first dup2 would overwrite the second.
        spare = [os.dup(to_read) for _ in range(4)]
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        to_write = os.dup(to_write)
        to_read = os.dup(to_read)
        self._process = subprocess.Popen(
            [executable, *flags],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (*spare, to_read, to_write):
            os.close(descriptor)
        self._buffer, self._number, self.problems = b"", 0, list[str]()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command to the page and return its result."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]  # type: ignore[no-any-return]
        raise TimeoutError(method)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            block = os.read(self._read, 1 << 20) if ready else b""
            if not block:
                raise TimeoutError("the browser does not answer")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        name, parameters = message.get("method", ""), message.get("params", {})
        if name == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif name == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("text")))
        elif name == "Network.requestWillBeSent" and parameters["request"]["url"].startswith("http"):
            self.problems.append(f"asks for {parameters['request']['url']}")
        elif name == "Page.javascriptDialogOpening":
            self.problems.append("a dialog was opened")
        return message

    def open(self, address: str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Load a page at a width and wait until its images are there."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=address)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if self.value("document.readyState === 'complete' && [...document.images].every(i => i.complete)"):
                return
            time.sleep(0.1)
        raise TimeoutError(address)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        try:
            self._call("Browser.close")
        except (TimeoutError, OSError, RuntimeError):
            self._process.kill()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
