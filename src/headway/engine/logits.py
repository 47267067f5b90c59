"""What changes one row of logits before a token is drawn: penalties, bias, and the tokens that may not come yet.

Order: repetition penalty (tokens of prompt and output: positive logits are divided by it, others multiplied; Keskar
et al. 2019, as Hugging Face does), then frequency and presence penalty (tokens of the output, as OpenAI defines them),
then ``logit_bias``, then the end tokens are masked while fewer than ``min_tokens`` have come.
"""

from __future__ import annotations

import numpy as np

from headway.engine.sequence import Sequence
from headway.kernels.draws import Floats, Ids
from headway.types import Params

FLOOR = -9999.0
"""The log-probability reported for what the model rules out (JSON has no infinity)."""


def penalised(params: Params) -> bool:
    """Whether the history of a sequence changes its logits."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjusts(sequence: Sequence) -> bool:
    """Whether the row of this sequence is changed at all before a token is drawn."""
    params = sequence.group.submit.params
    return penalised(params) or bool(params.logit_bias) or sequence.n_output < params.min_tokens


class History:
    """The tokens that one sequence has seen, counted as they come."""

    def __init__(self, sequence: Sequence, vocabulary: int) -> None:
        prompt = np.unique(np.asarray(sequence.tokens[: sequence.output_start], dtype=np.int64))
        self._vocabulary = vocabulary
        self._prompt: Ids = prompt[(prompt >= 0) & (prompt < vocabulary)]
        self._counts: dict[int, int] = {}
        self._counted = sequence.output_start

    def catch_up(self, sequence: Sequence) -> None:
        """Count the output tokens that came since the last call."""
        for token in sequence.tokens[self._counted :]:
            if 0 <= token < self._vocabulary:
                self._counts[token] = self._counts.get(token, 0) + 1
        self._counted = len(sequence.tokens)

    def penalise(self, row: Floats, params: Params) -> None:
        """Apply the three penalties to ``row`` in place."""
        output: Ids = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        if params.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt, output)
            values = row[seen]
            factor = params.repetition_penalty
            with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
                row[seen] = np.where(values > 0, values / factor, values * factor)
        if len(output):
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            row[output] -= params.frequency_penalty * counts + params.presence_penalty


def adjust(row: Floats, sequence: Sequence, history: History | None) -> None:
    """Change a sequence's row in place; ids outside of the vocabulary are ignored."""
    params = sequence.group.submit.params
    if history is not None:
        history.catch_up(sequence)
        history.penalise(row, params)
    if params.logit_bias:
        count = len(params.logit_bias)
        tokens = np.fromiter(params.logit_bias, np.int64, count)
        biases = np.fromiter(params.logit_bias.values(), np.float32, count)
        inside = (tokens >= 0) & (tokens < len(row))
        row[tokens[inside]] += biases[inside]
    if sequence.n_output < params.min_tokens:
        ends = [token for token in (*sequence.group.eos, *params.stop_token_ids) if 0 <= token < len(row)]
        row[ends] = -np.inf
