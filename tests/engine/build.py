"""Small engines for the tests."""

from zerogap.engine import Engine, EngineConfig, Request, SamplingParams

from ..support import random_decoder


class LetterTokenizer:
    """Ids 1 to 49 are bytes of a short alphabet, some of them parts of characters; higher ids repeat them."""

    alphabet = b"".join(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz 0123456789.,;:!?-+=_") + "é".encode()
    stop_ids = (0,)

    def decode(self, ids):
        return bytes(self.alphabet[token % 50 - 1] for token in ids if token % 50).decode("utf-8", errors="replace")

    def encode(self, text):
        return tuple(self.alphabet.index(byte) + 1 for byte in text.encode())


def make_engine(decoder=None, **config):
    config = {"num_pages": 200, **config}
    return Engine(decoder or random_decoder(), LetterTokenizer(), EngineConfig(**config))


def request(number, prompt, prompt_number=0, **params):
    return Request((0, prompt_number, number), tuple(prompt), SamplingParams(**params))
