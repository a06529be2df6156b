"""Ray jobs through the cluster's job server: state, log and stop of one job, never of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from zerogap.errors import UsageError

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
LOGS = Path("/tmp/ray/session_latest/logs")


@dataclass(frozen=True)
class Job:
    """What the job server says of one job."""

    submission_id: str
    job_id: str  # Ray's own hex id, which stands in the environment of the job's workers
    status: str
    message: str
    driver_pid: int | None

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.status in ENDED


class JobServer:
    """A client of one cluster's job server."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        self.address = address.rstrip("/")
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def _get(self, path: str) -> Any:
        try:
            answer = self._client.get(f"{self.address}{path}")
        except httpx.HTTPError as error:
            raise UsageError(
                f"no Ray job server at {self.address} ({str(error)[:120]}); give --ray-address http://HEAD:8265"
            ) from None
        if answer.status_code == 404:
            raise UsageError(f"the Ray job server at {self.address} knows no such job; see `ray job list`")
        if answer.status_code != 200:
            raise UsageError(f"the Ray job server at {self.address} answers {answer.status_code} to {path}")
        return answer.json()

    def job(self, name: str) -> Job:
        """Return the job with this submission id or hex job id.

        Raises:
            UsageError: when the server cannot be reached or knows no such job.
        """
        body = self._get(f"/api/jobs/{name}")
        driver = body.get("driver_info") or {}
        pid = driver.get("pid")
        return Job(
            submission_id=str(body.get("submission_id") or name),
            job_id=str(body.get("job_id") or driver.get("id") or ""),
            status=str(body.get("status", "")),
            message=str(body.get("message") or ""),
            driver_pid=int(pid) if pid is not None and str(pid).isdigit() else None,
        )

    def actors(self, job: Job) -> list[tuple[int, str]]:
        """Return (pid, class) of the job's living actors on any node.

        A worker that Ray started in advance carries no job id in its environment, so the environment alone does not
        find them all.
        """
        query = f"?limit=1000&filter_keys=job_id&filter_predicates=%3D&filter_values={job.job_id}"
        try:
            body = self._get(f"/api/v0/actors{query}")
            rows = body["data"]["result"]["result"]
            return [(int(row["pid"]), str(row["class_name"])) for row in rows if row.get("state") == "ALIVE"]
        except (UsageError, KeyError, TypeError, ValueError):
            return []  # a Ray without its dashboard has no such view

    def logs(self, name: str) -> str:
        """Return the whole log of the job's driver."""
        return str(self._get(f"/api/jobs/{name}/logs").get("logs", ""))

    def stop(self, name: str) -> bool:
        """Ask the server to stop the job; True when it says that it does."""
        try:
            answer = self._client.post(f"{self.address}/api/jobs/{name}/stop")
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


def local_log(submission_id: str) -> Path | None:
    """Return the driver's log file when the head of the cluster is this host."""
    path = LOGS / f"job-driver-{submission_id}.log"
    return path if path.is_file() else None
