"""Prompts, and the check that two models generate alike."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import VOCABULARY

FIRST_ID = 3
"""0, 1 and 2 are padding, start and end."""


def prompt(batch: int, columns: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ID, VOCABULARY, (batch, columns), generator=numbers)


def mixed(lengths: list[int], side: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows of these lengths, padded to the longest on one side."""
    columns = max(lengths)
    ids, mask = torch.zeros(len(lengths), columns, dtype=torch.long), []
    for row, length in enumerate(lengths):
        start = columns - length if side == "left" else 0
        ids[row, start : start + length] = prompt(1, length, seed + row)[0]
        mask.append([start <= column < start + length for column in range(columns)])
    return ids, torch.tensor(mask).long()


def same_tokens(local: Any, remote: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    arguments = {"do_sample": False, "pad_token_id": 0, **arguments}
    expected = local.generate(ids, **arguments)
    found = remote.generate(ids, **arguments)
    assert found.tolist() == expected.tolist()
    return found
