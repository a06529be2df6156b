"""Custom rollout functions that fail, each in its way."""

import sys
import time

from zerogap.rl.custom import Transcript


def _one(context, prompt, ids=None, **params):
    transcript = Transcript(context.encode_prompt(prompt))
    transcript.add_completion(context.generate(transcript.tokens if ids is None else ids, **params))
    return transcript


def _with(context, prompt, tokens):
    transcript = _one(context, prompt)
    transcript.add_tokens(tokens)
    return transcript


def raises(context, prompt):
    raise KeyError("boo")


def exits(context, prompt):
    sys.exit(0)


def interrupts(context, prompt):
    raise KeyboardInterrupt


def nothing_at_all(context, prompt):
    return None


def no_completion(context, prompt):
    return Transcript(context.encode_prompt(prompt))


def asks_for_text(context, prompt):
    return _one(context, prompt, max_tokens="x")


def asks_without_room(context, prompt):
    transcript = Transcript(context.encode_prompt(prompt))
    transcript.add_tokens([3] * context.room(transcript.tokens))
    transcript.add_completion(context.generate(transcript.tokens))
    return transcript


def wrong_stop(context, prompt):
    return _one(context, prompt, stop=5)


def wrong_ids(context, prompt):
    return _one(context, prompt, ids=["a"])


def unknown_id(context, prompt):
    return _one(context, prompt, ids=[10**9])


def inserts_text(context, prompt):
    return _with(context, prompt, "text")


def inserts_unknown_id(context, prompt):
    return _with(context, prompt, [10**9])


def inserts_too_much(context, prompt):
    return _with(context, prompt, [3] * 5000)


def tampers(context, prompt):
    transcript = _one(context, prompt)
    transcript.logprobs = ["x"] * len(transcript.logprobs)
    return transcript


def hangs(context, prompt):
    time.sleep(600)
