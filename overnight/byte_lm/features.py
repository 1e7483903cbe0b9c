"""Texts to features: what a recurrent byte model holds in its state when it has read a text.

Shapes: B texts at once, T bytes of a window, H width of the model, F features.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overnight.engine.finite import finite_outputs
from overnight.errors import ConfigError, DataError
from overnight.models.bytes import ByteModel
from overnight.run_dir.atomic import write_whole
from overnight.state_files import parse_json
from overnight.tasks.inputs import read_lines
from overnight.tasks.tables import read_csv, read_jsonl, read_text, read_tsv

# Texts read at once: from here on the matrix products of a step run at full speed on a CPU.
_TEXTS = 128
# States of a window (values): bounds the memory at any width; and its bytes, so that texts that have ended are soon left out.
_STATES = 1 << 25
_WINDOW = 256


@torch.no_grad()
def extract_features(
    model: ByteModel,
    documents: Sequence[bytes],
    features: str = "cell",
    dtype: torch.dtype = torch.float32,
    report_progress: Callable[[int, int], None] | None = None,
) -> npt.NDArray[np.float32]:
    """Describe each document by the states of the top layer, read from a state of zero.

    Documents of nearly equal length are read together; longer ones window after window with the state carried on.

    Args:
        model: an mLSTM or LSTM; put on its device before.
        documents: bytes as :func:`overnight.corpus.bytes.document_bytes` gives them; none empty.
        features: `cell` and `hidden` are those after the last byte (Radford et al. 2017, arXiv:1704.01444, take the cell's),
            `mean` is the mean of the hidden states; several joined by `+` stand side by side.
        dtype: of matrix products and activations; the state is fp32 always.
        report_progress: called with the documents and the bytes read, now and then.

    Returns:
        (documents, F), in the order given.

    Raises:
        ConfigError: for a Transformer, which has no state to carry.
        NonFiniteError: when a feature is no finite number.
    """
    parts = features.split("+")
    if not model.recurrent:
        raise ConfigError("features are the state of a recurrent model (model.kind = mlstm or lstm); a Transformer has none")
    model.eval()
    width = model.state_shape[-1]
    out = np.empty((len(documents), len(parts) * width), np.float32)
    longest_first = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    size = 0
    for first in range(0, len(documents), _TEXTS):
        index = longest_first[first : first + _TEXTS]
        texts = [documents[i] for i in index]
        found = _last_states(model, texts, "mean" in parts, dtype)
        out[index] = finite_outputs(torch.cat([found[part] for part in parts], 1).cpu().numpy())
        size += sum(map(len, texts))
        if report_progress:
            report_progress(first + len(texts), size)
    return out


def _last_states(model: ByteModel, texts: list[bytes], mean: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the features of some documents, longest first: each (B, H) fp32."""
    lengths = torch.tensor([len(text) for text in texts])
    device, width = next(model.parameters()).device, model.state_shape[-1]
    out = {part: torch.zeros(len(texts), width, device=device) for part in ("cell", "hidden", "mean")}
    window = max(1, min(_WINDOW, _STATES // (len(texts) * width)))
    state = model.zero_state(len(texts))
    for start in range(0, len(texts[0]), window):
        alive = int((lengths > start).sum())
        here = (lengths[:alive] - start).clamp(max=window)
        ids = np.zeros((alive, int(here[0])), np.int64)
        for row, count in enumerate(here.tolist()):
            ids[row, :count] = np.frombuffer(texts[row], np.uint8, count, start)
        hidden_BTH, cell_BTH, state = model.hidden(torch.from_numpy(ids).to(device), state[:alive], dtype)
        assert cell_BTH is not None
        # The longer documents stand first: those that end in this window are its last rows.
        going_on = int((lengths[:alive] > start + window).sum())
        rows = torch.arange(going_on, alive, device=device)
        last = here[going_on:].to(device) - 1
        out["cell"][going_on:alive] = cell_BTH[rows, last].float()
        out["hidden"][going_on:alive] = hidden_BTH[rows, last].float()
        if mean:
            inside = torch.arange(ids.shape[1]) < here[:, None]
            out["mean"][:alive] += (hidden_BTH.float() * inside.to(device)[..., None]).sum(1)
    out["mean"] /= lengths.to(device)[:, None]
    return out


def read_texts(path: str, field: str = "text") -> list[str]:
    """Return the texts of a file, by its ending: a column of .csv or .tsv, a key of .jsonl or .json, else its lines.

    A .json file is a list of texts, a list of objects, or JSON lines. An empty line of plain text is an empty text.

    Args:
        path: the file; `-` is standard input, line by line.
        field: the column or key.

    Raises:
        DataError: naming file, line and column.
    """
    tables = {".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl}
    ending = Path(path).suffix.lower()
    if ending == ".json" and (texts := _json_list(Path(path), field)) is not None:
        return texts
    if ending not in (*tables, ".json"):
        texts = [line.rstrip("\r\n") for line in read_lines(path)]
        if not texts:
            raise DataError(f"{path}: holds no lines")
        return texts
    texts = []
    for number, cells in tables.get(ending, read_jsonl)(Path(path)):
        if field not in cells:
            raise DataError(f"{path}:{number}: has no {field!r} (it has {', '.join(cells)}); name the texts with --field")
        texts.append(cells[field])
    return texts


def _json_list(path: Path, field: str) -> list[str] | None:
    """Return the texts of a file that is one JSON list, or None for JSON lines."""
    try:
        rows = parse_json(read_text(path))
    except ValueError:
        return None
    if isinstance(rows, dict):  # the only line
        return None
    texts: list[str] = []
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        text = row.get(field) if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise DataError(
                f"{path}: entry {number}: is neither a text nor an object with a text under {field!r}; name the key with --field"
            )
        texts.append(text)
    if not texts:
        raise DataError(f"{path}: is not a list of texts")
    return texts


def features_file(name: str) -> Path:
    """Return where features are written.

    Raises:
        ConfigError: when the name does not end in .npy.
    """
    if not name.endswith(".npy"):
        raise ConfigError(f"--to = {name!r}: features are written as .npy; give the file that ending")
    return Path(name)


def write_features(path: Path, features: npt.NDArray[np.float32]) -> None:
    """Write an array as .npy, whole or not at all."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(features))
    write_whole(path, [head.getvalue(), np.ascontiguousarray(features).data.cast("B")])
