"""Asks an engine with the openai client alone: an independent second opinion on what ``zerogap probe`` finds.

Run in the peer's environment: python openai_script.py ADDRESS. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

PROMPT = "My grandmother kept bees behind the house, and every summer we"


def main(address: str) -> None:
    """Ask and print."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)
    model = client.models.list().data[0].id

    def ask(prompt: str = PROMPT, **settings: object) -> openai.types.Completion:
        given = {"max_tokens": 12, "temperature": 0, "logprobs": 10, **settings}
        return client.completions.create(model=model, prompt=prompt, **given)

    def bits(reply: openai.types.Completion) -> tuple[object, object]:
        table = reply.choices[0].logprobs
        return tuple(table.tokens), tuple(value.hex() for value in table.token_logprobs)

    ask()
    alone = bits(ask())
    repeat = all(bits(ask()) == alone for _ in range(3))
    with ThreadPoolExecutor(24) as pool:
        others = [pool.submit(ask, f"Number {n}: {'so ' * (3 * n)}", max_tokens=16) for n in range(12)]
        victim = pool.submit(ask)
        others += [pool.submit(ask, f"Letter {n}: {'la ' * n}", max_tokens=16) for n in range(11)]
        company = bits(victim.result()) == alone
        for other in others:
            other.result()
    sampled = {seed: [ask(temperature=1, seed=seed).choices[0].text for _ in range(2)] for seed in (1, 2, 3)}
    seeds = all(a == b for a, b in sampled.values()) and len({a for a, _ in sampled.values()}) > 1
    first = ask(temperature=1, max_tokens=1).choices[0].logprobs.top_logprobs[0]
    half = ask(temperature=0.5, max_tokens=1).choices[0].logprobs.top_logprobs[0]
    narrow = ask(temperature=1, top_p=0.3, max_tokens=1).choices[0].logprobs.top_logprobs[0]
    both = [token for token in first if token in half and token in narrow]
    print(
        json.dumps(
            {
                "repeat": repeat,
                "company": company,
                "seeds": seeds,
                "raw_temperature": all(abs(first[t] - half[t]) < 1e-3 for t in both),
                "raw_truncation": all(abs(first[t] - narrow[t]) < 1e-3 for t in both) and len(both) > 5,
                "wrong_model": wrong_model(client),
            }
        )
    )


def wrong_model(client: openai.OpenAI) -> int:
    """Return the status of a request for a model that does not exist."""
    try:
        client.completions.create(model="no-such-model", prompt="x", max_tokens=1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


main(sys.argv[1])
