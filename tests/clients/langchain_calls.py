"""What langchain-openai gets from a server: JSON for the test that runs this with its Python.

python langchain_calls.py URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=8, presence_penalty=0.5,
        frequency_penalty=0.5, seed=3, logprobs=True, top_logprobs=2, stream_usage=True,
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2},
    )  # fmt: skip
    whole = chat.invoke("Hello!")
    parts = list(chat.stream("Hello!"))
    text = OpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=4)
    told = {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "logprobs": len(whole.response_metadata["logprobs"]["content"]),
        "stream": "".join(part.content for part in parts),
        "streamed_usage": sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts),
        "async": asyncio.run(chat.ainvoke("Hello!")).content,
        "batch": [answer.content for answer in chat.batch(["Hello!", "Hello!"])],
        "text": text.invoke("2 + 2 ="),
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
