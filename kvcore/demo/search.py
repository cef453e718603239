"""Beam search over bytes, on the host, in float64. Greedy search is width 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """The best continuations of all beams, best first."""

    parents: Int64
    """[W] the old beam that each new one continues."""
    tokens: Int64
    """[W] the byte it continues it with."""
    log_probs: Float64
    """[W] summed log-probability of each new beam, in nats."""


def log_softmax(logits: NDArray[np.float32]) -> Float64:
    """Log-probabilities of [R, V] logits."""
    shifted: Float64 = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    total: Float64 = np.exp(shifted).sum(axis=-1, keepdims=True)
    return shifted - np.log(total)


def expand(log_probs: Float64, logits: NDArray[np.float32], width: int) -> Choice:
    """The `width` best of all one-byte continuations of R beams. O(R * V log(R * V)).

    All beams are equally long, so the order by summed log-probability is the order by the
    length-normalised score. Ties go to the lower beam, then to the lower byte: the result depends
    on the logits alone.

    >>> choice = expand(np.array([-1.0, -2.0]), np.log([[0.7, 0.3], [0.9, 0.1]]), 2)
    >>> choice.parents.tolist(), choice.tokens.tolist()
    ([0, 1], [0, 0])
    """
    scores = log_probs[:, None] + log_softmax(logits)
    best = np.argsort(-scores, axis=None, kind="stable")[:width]
    parents, tokens = np.divmod(best, logits.shape[1])
    return Choice(parents, tokens, scores.reshape(-1)[best])


class Hypotheses:
    """The bytes of every beam so far.

    >>> beams = Hypotheses()
    >>> beams.follow(Choice(np.array([0, 0]), np.array([104, 97]), np.array([-1.0, -2.0])))
    >>> beams.follow(Choice(np.array([1, 0]), np.array([104, 105]), np.array([-2.5, -3.0])))
    >>> beams.texts, beams.scores
    ([b'ah', b'hi'], [-1.25, -1.5])
    """

    def __init__(self) -> None:
        self.texts: list[bytes] = [b""]
        self.log_probs: Float64 = np.zeros(1)

    def follow(self, choice: Choice) -> None:
        """Replaces the beams by their chosen continuations."""
        steps = zip(choice.parents.tolist(), choice.tokens.tolist(), strict=True)
        self.texts = [self.texts[parent] + bytes((token,)) for parent, token in steps]
        self.log_probs = choice.log_probs

    @property
    def scores(self) -> list[float]:
        """Length-normalised scores: mean log-probability per byte, in nats."""
        return [float(value) / max(1, len(self.texts[0])) for value in self.log_probs]
