"""llama.cpp in its own environment, which has nothing of ours: ``PYTHON llama_cpp_child.py JOB.json``.

A job quantises a file, or says what llama.cpp makes of one: the ids of texts, and the logits of prompts.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any


def quantised(job: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = job["ftype"]
    params.nthread = 1
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(job["source"].encode(), job["target"].encode(), ctypes.byref(params))
    return {"status": status}


def told(job: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp
    import numpy as np

    llm = llama_cpp.Llama(job["model"], n_ctx=256, n_threads=1, logits_all=True, verbose=bool(job.get("verbose")))
    ids = [llm.tokenize(text.encode(), add_bos=job["special"], special=True) for text in job["texts"]]
    logits = []
    for prompt in job["prompts"]:
        llm.reset()
        llm.eval(prompt)
        logits.append(np.array(llm.scores[: len(prompt)], np.float32))
    if logits:
        np.save(job["logits"], np.concatenate(logits))
    return {"ids": ids}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(given["answer"]).write_text(json.dumps(quantised(given) if "ftype" in given else told(given)))
