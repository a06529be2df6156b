"""The side of llama.cpp's server: python llama_side.py LLAMA_SERVER MODEL.gguf VOCABULARY. Standard library only.

The server is started for each number of sequences, with a slot and a KV stream for each: its best form for that number.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from jsonlines import Answer, prompts, serve, take_stdout, timed

START_S = 60


class Server:
    """One llama-server with ``slots`` slots; replaced when another number is asked for."""

    def __init__(self, program: str, model: str) -> None:
        self.program, self.model = program, model
        self.slots = 0
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def need(self, slots: int, context: int) -> None:
        """Have a server with that many slots of ``context`` tokens."""
        if slots == self.slots and self.process is not None and self.process.poll() is None:
            return
        self.end()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        threads = os.environ.get("OMP_NUM_THREADS", "2")
        command = [self.program, "-m", self.model, "-np", str(slots), "-c", str(slots * context), "--no-kv-unified"]
        command += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", str(self.port), "--no-webui"]
        command += ["--cache-ram", "0", "--threads-http", str(slots + 2)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.slots = slots
        limit = time.monotonic() + START_S
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"llama-server with {slots} slots did not start within {START_S} s")

    def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def main(program: str, model: str, vocabulary: int) -> None:
    channel = take_stdout()
    server = Server(program, model)

    def generate(sequences: int, prompt_tokens: int, new_tokens: int, seed: int, logprobs: bool = True) -> Answer:
        server.need(sequences, -(-(prompt_tokens + new_tokens + 1) // 64) * 64)
        sampler = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
        asked = [
            {
                "prompt": ids,
                "n_predict": new_tokens,
                "ignore_eos": True,
                "cache_prompt": False,
                "seed": seed * 1000 + number,
                "n_probs": 1 if logprobs else 0,
                **sampler,
            }
            for number, ids in enumerate(prompts(sequences, prompt_tokens, vocabulary, seed))
        ]
        answer: Answer = {}
        with ThreadPoolExecutor(sequences) as pool, timed(answer):
            replies = list(pool.map(lambda body: server.ask("POST", "/completion", body), asked))
        wrong = [reply for status, reply in replies if status != 200]
        if wrong:
            return {"error": f"llama-server: {wrong[0]}"}
        answer["tokens"] = sum(reply["tokens_predicted"] for _, reply in replies)
        if answer["tokens"] != sequences * new_tokens:
            return {"error": f"llama-server made {answer['tokens']} of {sequences * new_tokens} tokens"}
        # The server holds back a token that ends within a character, at times for good, and its log-prob with it.
        given = sum(len(reply.get("completion_probabilities", ())) for _, reply in replies)
        if logprobs and given < 0.95 * answer["tokens"]:
            return {"error": f"llama-server gave log-probs for {given} of {answer['tokens']} tokens"}
        return answer

    try:
        serve(channel, {"generate": generate}, {"llama.cpp": os.path.basename(model)})
    finally:
        server.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
