"""What `README.md` of an exported byte model says: the tensors that its folder has, and what is computed from them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEAD = """# A byte model of overnight

`model.safetensors`, fp32. H is the width{more}; y = x W^T, so a row of a matrix belongs to an output.

| tensor | shape | |
|---|---|---|
"""
_TAIL = """
A text is read as the UTF-8 bytes of a line feed, a space, the text, a space.
`config.json` is a recipe; of its keys only `model` says something about these tensors.
"""
_RECURRENT = {
    r"embedding\.weight": "`embedding.weight` | 256, E | a row for each byte value",
    r"layers\.\d+\.w_[xh]": "`layers.N.w_x`, `layers.N.w_h` | 4H, E (H from the second layer on); 4H, H | to the gates, in the order i, f, g, o",
    r"layers\.\d+\.w_m[xh]": "`layers.N.w_mx`, `layers.N.w_mh` | H, E (H); H, H | m = (W_mx x) * (W_mh h), which W_h is multiplied by in place of h",
    r"layers\.\d+\.b": "`layers.N.b` | 4H | of the gates",
    r"layers\.\d+\.g\.w_\w+": "`layers.N.g.w_x` and so on | as the rows | weight normalization: the row is g v/|v|, and v is what lies under the matrix's own name",
}
_TRANSFORMER = {
    r"embedding\.weight": "`embedding.weight` | 256, H | a row for each byte value",
    r"position\.weight": "`position.weight` | P, H | a row for each place in the window, added to that of the byte",
    r"layers\.\d+\.norm[12]\.\w+": "`layers.N.norm1.weight`, `.bias`, `layers.N.norm2.weight`, `.bias` | H | LayerNorm, to whose variance 1e-12 is added",
    r"layers\.\d+\.qkv\.\w+": "`layers.N.qkv.weight`, `.bias` | 3H, H; 3H | queries, keys and values, each of all heads",
    r"layers\.\d+\.out\.\w+": "`layers.N.out.weight`, `.bias` | H, H; H | behind the heads",
    r"layers\.\d+\.up\.\w+": "`layers.N.up.weight`, `.bias` | I, H; I | to the inner width",
    r"layers\.\d+\.down\.\w+": "`layers.N.down.weight`, `.bias` | H, I; H | and back",
    r"norm\.\w+": "`norm.weight`, `norm.bias` | H | the last LayerNorm, after all layers",
}
_BOTH = {
    r"decoder\.\w+": "`decoder.weight`, `decoder.bias` | 256, H; 256 | logits of the next byte",
    r"label\.\w+": "`label.weight`, `label.bias` | 1, H; 1 | the number that was learned along with the text, from {features} after the last byte",
}
_EQUATIONS = {
    "mlstm": "The gates are W_x x + b + W_h m. c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c); the x of a layer above the first is the h below it.",
    "lstm": "The gates are W_x x + b + W_h h. c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c); the x of a layer above the first is the h below it.",
    "transformer": "A layer is x = x + out(attention(qkv(norm1(x)))), then x = x + down(gelu(up(norm2(x)))), with GELU by the error function. "
    "Attention is causal, its products divided by the root of the width of a head. A model sees P bytes and no further.",
}


def byte_readme(kind: str, names: Iterable[str]) -> str:
    """Return the text of a `README.md`.

    Args:
        kind: of the network: mlstm, lstm, transformer.
        names: of its tensors.
    """
    causal = kind == "transformer"
    rows = {**(_TRANSFORMER if causal else _RECURRENT), **_BOTH}
    found = {next(row for pattern, row in rows.items() if re.fullmatch(pattern, name)) for name in names}
    table = "".join(f"| {row.format(features='the hidden state' if causal else 'c')} |\n" for row in rows.values() if row in found)
    more = ", I that inside the feed-forward part, P the number of positions" if causal else ", E that of the embedding"
    return f"{_HEAD.format(more=more)}{table}\n{_EQUATIONS[kind]}\n{_TAIL}"
