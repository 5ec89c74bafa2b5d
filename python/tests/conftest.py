"""Puts this folder on sys.path, so that tests in subfolders can import the modules of helpers here;
keeps what the user has tuned out."""

import os

import numpy as np
import pytest

os.environ["CUTLOSS_TUNING_FILE"] = "none"


@pytest.fixture
def data(tmp_path):
    """A small problem as .npy files: (folder, arrays)."""
    rng = np.random.default_rng(0)
    arrays = {
        "e": rng.normal(size=(37, 19)).astype(np.float32),
        "c": rng.normal(size=(101, 19)).astype(np.float32),
        "labels": rng.integers(0, 101, 37),
    }
    arrays["labels"][3] = -100
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path, arrays
