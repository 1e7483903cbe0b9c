"""An mLSTM in float64, step by step as its equations stand (Krause et al. 2016), from plain arrays: what every reader is held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def read(arrays: Arrays, text: bytes, gates: str = "ifgo") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells and hidden states (T, H) after each byte, and the log-probabilities (T, 256) of the next one.

    Args:
        arrays: embedding (256, E), w_x (4H, E), w_h (4H, H), w_mx (H, E), w_mh (H, H), b (4H), decoder (256, H), bias (256), and the norms
            g_x, g_h, g_mx, g_mh of the rows where there is weight normalization.
        gates: their order in the rows; g is the candidate.
    """
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    for name in ("x", "h", "mx", "mh"):
        if f"g_{name}" in a:
            a[f"w_{name}"] = a[f"w_{name}"] / np.linalg.norm(a[f"w_{name}"], axis=1, keepdims=True) * a[f"g_{name}"][:, None]
    h = c = np.zeros(len(a["w_mh"]))
    cells, hidden, logits = [], [], []
    for byte in text:
        x = a["embedding"][byte]
        m = (a["w_mx"] @ x) * (a["w_mh"] @ h)
        z = dict(zip(gates, np.split(a["w_x"] @ x + a["b"] + a["w_h"] @ m, 4), strict=True))
        c = sigmoid(z["f"]) * c + sigmoid(z["i"]) * np.tanh(z["g"])
        h = sigmoid(z["o"]) * np.tanh(c)
        cells.append(c)
        hidden.append(h)
        logits.append(a["decoder"] @ h + a["bias"])
    scores = np.stack(logits)
    scores -= scores.max(1, keepdims=True)
    return np.stack(cells), np.stack(hidden), scores - np.log(np.exp(scores).sum(1, keepdims=True))


def bits(arrays: Arrays, text: bytes, gates: str = "ifgo") -> float:
    """Bits for each byte of a text but the first."""
    log_p = read(arrays, text, gates)[2]
    return float(-np.mean([log_p[t, text[t + 1]] for t in range(len(text) - 1)]) / np.log(2))


def random_arrays(width: int, embedding: int, seed: int = 0, weight_norm: bool = True) -> Arrays:
    """Weights large enough that every gate is used, and small enough that rounding does not grow from byte to byte."""
    chance = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return chance.normal(0, 0.25, shape).astype(np.float32)

    found = {"embedding": 4 * draw(256, embedding), "w_x": draw(4 * width, embedding), "w_h": draw(4 * width, width)}
    found |= {"w_mx": draw(width, embedding), "w_mh": draw(width, width), "b": draw(4 * width)}
    found |= {"decoder": draw(256, width), "bias": draw(256)}
    if weight_norm:
        for name in ("x", "h", "mx", "mh"):
            found[f"g_{name}"] = np.abs(draw(len(found[f"w_{name}"]))) + 1
    return found


def write_openai(folder: Path, arrays: Arrays) -> Path:
    """The 15 files of OpenAI's model: (inputs, outputs), W_h in 4 parts, gates i, f, o, g."""
    folder.mkdir(exist_ok=True)
    a = {name: array.T for name, array in arrays.items()}
    listed = [arrays["embedding"], a["w_x"], *np.split(a["w_h"], 4, axis=1), a["w_mx"], a["w_mh"], a["b"]]
    listed += [a["g_x"], a["g_h"], a["g_mx"], a["g_mh"], a["decoder"], a["bias"]]
    assert len(listed) == 15
    for number, array in enumerate(listed):
        np.save(folder / f"{number}.npy", array)
    return folder
