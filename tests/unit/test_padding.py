"""Packing of padded batches: what is dropped, and what comes back where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bloombee.client.packing import Packing
from bloombee.errors import RequestError


def test_an_unmasked_batch_is_a_reshape() -> None:
    packing = Packing.of(2, 3, torch.ones(2, 3, dtype=torch.long))
    ids = torch.arange(6).reshape(2, 3)
    assert packing.is_dense
    assert packing.counts == (3, 3)
    assert packing.pack(ids).tolist() == [0, 1, 2, 3, 4, 5]
    assert packing.unpack(torch.arange(6.0).reshape(6, 1)).squeeze(2).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_left_right_and_holes_are_dropped_and_put_back() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]])
    packing = Packing.of(3, 4, mask)
    assert packing.counts == (2, 2, 2)
    assert packing.pack(torch.arange(12).reshape(3, 4)).tolist() == [2, 3, 4, 5, 8, 10]
    results = torch.tensor([[20.0], [30.0], [40.0], [50.0], [80.0], [100.0]])
    assert packing.unpack(results).squeeze(2).tolist() == [
        [0, 0, 20, 30],
        [40, 50, 50, 50],
        [80, 80, 100, 100],
    ]


def test_rows_without_a_token_read_what_is_carried_over() -> None:
    mask = torch.tensor([[0, 0], [0, 1]])
    packing = Packing.of(2, 2, mask)
    carried = torch.tensor([[7.0], [8.0]])
    assert packing.counts == (0, 1)
    assert packing.unpack(torch.tensor([[1.0]]), carried).squeeze(2).tolist() == [[7, 7], [8, 1]]
    assert packing.unpack_last(torch.tensor([[1.0]]), carried).squeeze(1).tolist() == [7, 1]
    assert packing.unpack_last(torch.tensor([[1.0]])).squeeze(1).tolist() == [0, 1]


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(RequestError, match=r"mask is \[2, 5\], the tokens are \[2, 4\]"):
        Packing.of(2, 4, torch.ones(2, 5))


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_unpack_matches_a_plain_loop(batch: int, columns: int, data: st.DataObject) -> None:
    bits = data.draw(
        st.lists(st.integers(0, 1), min_size=batch * columns, max_size=batch * columns)
    )
    mask = torch.tensor(bits).reshape(batch, columns)
    packing = Packing.of(batch, columns, mask)
    values = torch.arange(1.0, batch * columns + 1).reshape(batch, columns, 1)
    packed = packing.pack(values)
    assert packed.shape[0] == packing.tokens == int(mask.sum())
    expected = torch.zeros(batch, columns)
    for row in range(batch):
        last = 0.0
        for column in range(columns):
            last = float(values[row, column]) if mask[row, column] else last
            expected[row, column] = last
    assert torch.equal(packing.unpack(packed).squeeze(2), expected)
    ends = [i for i in range(batch) if packing.counts[i]]
    last_rows = torch.cumsum(torch.tensor(packing.counts), 0)[ends] - 1
    assert torch.equal(packing.unpack_last(packed[last_rows]).squeeze(1), expected[:, -1])
