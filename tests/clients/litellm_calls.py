"""What LiteLLM gets from a server: JSON for the test that runs this with its Python.

python litellm_calls.py URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]

HELLO = [{"role": "user", "content": "Hello!"}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"5": -100},
    "max_tokens": 8,
}
BEYOND_OPENAI = {"extra_body": {"min_p": 0.05, "repetition_penalty": 1.1, "top_k": 20, "min_tokens": 2}}


def main(url: str, model: str) -> None:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    chat: dict[str, Any] = {"model": f"openai/{model}", "messages": HELLO, **SAMPLING, **BEYOND_OPENAI, **where}
    whole = litellm.completion(**chat)
    parts = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="2 + 2 =", max_tokens=4, temperature=0, logprobs=2, **where
    )
    try:
        litellm.completion(**{**chat, "model": "openai/other"})
        refused = None
    except litellm.NotFoundError as error:
        refused = type(error).__name__
    told = {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "stream": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
        "async": asyncio.run(litellm.acompletion(**chat)).choices[0].message.content,
        "text": text.choices[0].text,
        "refused": refused,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
