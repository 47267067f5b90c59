"""What cannot fit the context by far is refused before it costs seconds of tokenising."""

from __future__ import annotations

from typing import Final

from headway.engine.assembly import Limits
from headway.engine.tokenizer import Tokenizer
from headway.errors import ContextExceeded
from headway.types import Request

SUSPECT: Final = 8
"""Characters per token of the context from which a request is looked at; ordinary text has about four."""
PIECE: Final = 16_384
"""Characters tokenised at a time."""
MARGIN: Final = 2
"""How many contexts the pieces must fill: cutting a text adds a token here and there."""


def refuse_oversize(request: Request, tokenizer: Tokenizer, limits: Limits) -> None:
    """Raise ContextExceeded for a text of several contexts, having tokenised no more of it than tells that."""
    context = limits.context_tokens
    messages = request.messages
    if messages is not None and len(messages) > context:
        raise ContextExceeded(
            f"{len(messages)} messages do not fit the model's context of {context} tokens; send fewer", param="messages"
        )
    # Templates may trim what they write, and leave out what an assistant said earlier.
    texts = (
        [request.text or ""]
        if messages is None
        else [(message.content or "").strip() for message in messages if message.role != "assistant"]
    )
    size = sum(map(len, texts))
    if size <= SUSPECT * context:
        return
    tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            tokens += len(tokenizer.encode(piece, add_special_tokens=False, allow_special=True))
            if tokens > MARGIN * context:
                raise ContextExceeded(
                    f"the prompt has {size} characters, more than {tokens} tokens; the model's context is {context}; "
                    "shorten the prompt",
                    param="prompt" if messages is None else "messages",
                )
