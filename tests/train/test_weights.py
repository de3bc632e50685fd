"""Files of safetensors, against the library that defines them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rota.spec.errors import BadInput
from rota.train.weights import WeightEntry, begin_file, find_tensors, in_files, read_tensor

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor(7, dtype=torch.int64),
    "c": torch.ones(3, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
}


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = {name: read_tensor(*place) for name, place in find_tensors(tmp_path).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in TENSORS.items())


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    entries = {name: WeightEntry(shape=tuple(one.shape), dtype=one.dtype, owner=0) for name, one in TENSORS.items()}
    with begin_file(tmp_path / "model.safetensors", entries) as out:
        for one in TENSORS.values():
            out.write(one.flatten().view(torch.uint8).numpy().data)
    assert all(torch.equal(one, TENSORS[name]) for name, one in load_file(tmp_path / "model.safetensors").items())


def test_a_file_that_is_cut_off_or_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-8])
    places = find_tensors(tmp_path)
    with pytest.raises(BadInput, match="is cut off"):
        [read_tensor(*place) for place in places.values()]
    path.write_bytes(b"pickle" * 9)
    with pytest.raises(BadInput, match="has no header"):
        find_tensors(tmp_path)
    path.unlink()
    with pytest.raises(BadInput, match=r"no \*\.safetensors"):
        find_tensors(tmp_path)


def test_tensors_fill_files_up_to_a_size_in_order() -> None:
    entries = {name: WeightEntry(shape=(10,), dtype=torch.float32, owner=0) for name in "abc"}
    assert in_files(entries, 1000) == {"model.safetensors": ["a", "b", "c"]}
    assert in_files(entries, 80) == {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c"],
    }
