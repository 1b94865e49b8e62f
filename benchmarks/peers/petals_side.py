"""What runs in Petals' own environment: a server, or a client that is driven by JSON lines.

Imports nothing of ours. `petals_side.py check`, `serve ARGUMENTS...` (those of
Petals' own `run_server`) or `client LOG`. Petals' code runs as it is; hivemind 1.1.12, which
stands in for 1.1.10, gets back the names that 1.1.10 had at its top.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import runpy
import sys
import time
from typing import Any

MOVED = (
    *("compression", "p2p", "utils", "utils.asyncio", "utils.limits", "utils.logging"),
    *("utils.mpfuture", "utils.nested", "utils.networking", "utils.performance_ema"),
    *("utils.serializer", "utils.streaming", "utils.tensor_descr", "utils.timed_storage"),
)


def restore_names() -> None:
    """Modifies hivemind: names of its parts at its top, and `anext`, which Python now has."""
    import hivemind

    for part in MOVED:
        module = importlib.import_module(f"hivemind.{part}")
        for name, value in vars(module).items():
            if not name.startswith("_") and not hasattr(hivemind, name):
                setattr(hivemind, name, value)
    for module in (hivemind, importlib.import_module("hivemind.utils.asyncio")):
        if not hasattr(module, "anext"):
            module.anext = builtins.anext  # type: ignore[attr-defined] - that is the point


def serve(arguments: list[str]) -> None:
    """Petals' server with these arguments, until it is told to stop."""
    sys.argv = ["run_server", *arguments]
    runpy.run_module("petals.cli.run_server", run_name="__main__")


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily for `ids`, all rows of one length; when each column came."""
    import torch
    from transformers import StoppingCriteriaList

    times: list[float] = []

    def never(*_: Any, **__: Any) -> bool:
        times.append(time.perf_counter())
        return False

    ids = torch.tensor(request["ids"])
    began_s = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            do_sample=False,
            max_new_tokens=request["new_tokens"],
            min_new_tokens=request["new_tokens"],
            stopping_criteria=StoppingCriteriaList([never]),
        )
    new = out[:, ids.shape[1] :].tolist()
    return {"began_s": began_s, "times_s": [times] * len(new), "ids": new}


def client(log: str) -> None:
    """First line in: the job. Then a request a line, each answered by a line."""
    lines = os.fdopen(os.dup(1), "w")
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    job = json.loads(sys.stdin.readline())
    import torch

    petals = importlib.import_module("petals")
    torch.set_num_threads(1)
    model = petals.AutoDistributedModelForCausalLM.from_pretrained(
        job["model"],
        initial_peers=job["initial_peers"],
        torch_dtype=getattr(torch, job["dtype"]),
        dht_prefix=job["prefix"],
    )
    print("ready", file=lines, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), file=lines, flush=True)
    end_at_once()


def end_at_once() -> None:
    """End this process and what it started: its DHT, left to itself, keeps it waiting."""
    import psutil

    for each in psutil.Process().children(recursive=True):
        each.kill()
    os._exit(0)


def main(arguments: list[str]) -> None:
    """See the module."""
    restore_names()
    match arguments:
        case ["check"]:
            importlib.import_module("petals.server.server")
            importlib.import_module("bitsandbytes")
        case ["serve", *rest]:
            serve(rest)
        case ["client", log]:
            client(log)
        case _:
            sys.exit("usage: petals_side.py check | serve ARGUMENTS... | client LOG")


if __name__ == "__main__":
    main(sys.argv[1:])
