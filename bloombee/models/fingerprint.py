"""What makes two servers serve the same model: its config and its weights, nothing else."""

from __future__ import annotations

import hashlib
import json

from bloombee.models.checkpoint import Identity

# Written by whoever saved the files; they say nothing about the model.
VOLATILE = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
LENGTH = 40


def fingerprint_of(identity: Identity) -> str:
    """Forty hex digits, equal for equal config and weight files wherever they lie.

    File names only order the hashes, so renamed folders and files meet.
    """
    config = {key: value for key, value in identity.config.items() if key not in VOLATILE}
    digests = [digest for _, digest in sorted(identity.weight_sha256.items())]
    text = json.dumps([config, digests], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
