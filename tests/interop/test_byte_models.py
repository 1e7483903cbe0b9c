"""Models of OpenAI and NVIDIA, written here in their layouts, give what the equations give; what does not fit is refused."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overnight.config import CausalLMConfig, RecurrentLMConfig
from overnight.errors import ConfigError, DataError, UserError
from overnight.interop.byte_models import import_byte_model, load_byte_model, without_weight_norm
from overnight.interop.byte_readme import byte_readme
from overnight.models.bytes import byte_model
from tests.interop.byte_formula import Arrays, bits, random_arrays, read, write_openai

TEXT = "\n The film — “Ödipus” — was dull. ".encode()
WIDTH, INNER = 24, 6


def nvidia_tree(arrays: Arrays, padded: bool = False, half: bool = False) -> dict[str, Any]:
    """A state dict as sentiment-discovery saves it; gates i, f, g, o."""
    t = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    tables = {
        name: torch.cat([torch.full_like(t[name][:1], 9.0), t[name]]) if padded else t[name] for name in ("embedding", "decoder", "bias")
    }
    rnn = {"rnns.0.b_ih": t["b"] - 1, "rnns.0.b_hh": torch.ones_like(t["b"])}
    for ours, theirs in (("x", "ih"), ("h", "hh"), ("mx", "mih"), ("mh", "mhh")):
        if f"g_{ours}" in t:
            rnn |= {f"rnns.0.w_{theirs}_v": t[f"w_{ours}"], f"rnns.0.w_{theirs}_g": t[f"g_{ours}"][:, None]}
        else:
            rnn[f"rnns.0.w_{theirs}"] = t[f"w_{ours}"]
    tree = {"encoder": {"encoder": {"weight": tables["embedding"]}, "rnn": rnn}}
    tree["decoder"] = {"weight": tables["decoder"], "bias": tables["bias"]}  # type: ignore[dict-item]

    def halved(value: Any) -> Any:
        return {k: halved(v) for k, v in value.items()} if isinstance(value, dict) else value.half()

    return halved(tree) if half else tree


def save(tree: Any, path: Path) -> Path:
    torch.save(tree, path)
    return path


def states(folder: Path, text: bytes = TEXT) -> tuple[np.ndarray, np.ndarray, float]:
    """Cells, hidden states, and bits a byte, of the model in a folder of ours."""
    model, _ = load_byte_model(folder)
    with torch.no_grad():
        h, c, _ = model.hidden(torch.tensor([list(text)]), torch.zeros(1, *model.state_shape), torch.float32)
        log_p = model.logits(h[0]).double().log_softmax(-1)
    assert c is not None
    return c[0].numpy(), h[0].numpy(), float(-np.mean([log_p[t, text[t + 1]] for t in range(len(text) - 1)]) / np.log(2))


def agrees(folder: Path, arrays: Arrays, gates: str = "ifgo", close: float = 2e-5) -> None:
    cells, hidden, found = states(folder)
    wanted = read(arrays, TEXT, gates)
    assert np.abs(wanted[0]).max() > 0.5  # a state that says something
    np.testing.assert_allclose(cells, wanted[0], atol=close)
    np.testing.assert_allclose(hidden, wanted[1], atol=close)
    assert found == pytest.approx(bits(arrays, TEXT, gates), abs=close)


def test_the_arrays_of_openai_give_what_their_equations_give(tmp_path: Path) -> None:
    arrays = random_arrays(WIDTH, INNER)
    model = import_byte_model(write_openai(tmp_path / "openai", arrays), tmp_path / "ours")
    assert (model.kind, model.num_layers, model.hidden_size, model.embedding_size, model.weight_norm) == ("mlstm", 1, WIDTH, INNER, True)
    agrees(tmp_path / "ours", arrays, "ifog")
    with pytest.raises(AssertionError):  # in another order of the gates it is another model
        agrees(tmp_path / "ours", arrays, "ifgo")


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("wrap", ["plain", "sd", "classifier", "module"])
def test_the_checkpoints_of_nvidia_give_what_their_equations_give(weight_norm: bool, padded: bool, wrap: str, tmp_path: Path) -> None:
    arrays = random_arrays(WIDTH, INNER, 1, weight_norm)
    tree = nvidia_tree(arrays, padded)
    wrapped: Callable[[Any], Any] = {
        "plain": lambda t: t,
        "sd": lambda t: {"sd": t, "epoch": 3},
        "classifier": lambda t: {"lm_encoder": {**t["encoder"], "decoder": t["decoder"]}, "classifier": {"weight": torch.ones(1, WIDTH)}},
        "module": lambda t: {f"module.{k}": v for k, v in t.items()},
    }[wrap]
    model = import_byte_model(save(wrapped(tree), tmp_path / "lang_model.pt"), tmp_path / "ours")
    assert model.weight_norm == weight_norm
    agrees(tmp_path / "ours", arrays)


def test_half_precision_checkpoints_become_fp32(tmp_path: Path) -> None:
    arrays = random_arrays(WIDTH, INNER, 2)
    import_byte_model(save(nvidia_tree(arrays, half=True), tmp_path / "model.pt"), tmp_path / "ours")
    agrees(tmp_path / "ours", arrays, close=2e-2)
    model, _ = load_byte_model(tmp_path / "ours")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_two_layers_are_read_in_order(tmp_path: Path) -> None:
    first, second = random_arrays(WIDTH, INNER, 3, False), random_arrays(WIDTH, WIDTH, 4, False)
    tree = nvidia_tree({**first, "decoder": second["decoder"], "bias": second["bias"]})
    tree["encoder"]["rnn"] |= {name.replace("rnns.0", "rnns.1"): t for name, t in nvidia_tree(second)["encoder"]["rnn"].items()}
    assert import_byte_model(save(tree, tmp_path / "model.pt"), tmp_path / "ours").num_layers == 2
    # The second layer reads the hidden states of the first as its embedding.
    hidden = read(first, TEXT)[1]
    over = {**second, "embedding": np.concatenate([hidden, np.zeros((256 - len(TEXT), WIDTH))])}
    np.testing.assert_allclose(states(tmp_path / "ours")[0], read(over, bytes(range(len(TEXT))))[0], atol=2e-5)


@pytest.mark.parametrize("number", [0, 5, 14])
def test_a_missing_array_is_named(number: int, tmp_path: Path) -> None:
    (write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)) / f"{number}.npy").unlink()
    with pytest.raises(DataError, match=rf"{number}\.npy: is missing"):
        import_byte_model(tmp_path / "openai", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("number", "array", "said"),
    [
        (2, np.zeros((WIDTH, WIDTH + 1), np.float32), r"2\.npy: has the shape \(24, 25\) where \(24, 24\) belongs"),
        (1, np.zeros((4 * WIDTH, INNER), np.float32), r"1\.npy: has the shape \(96, 6\) where \(6, 96\) belongs"),
        (7, np.zeros(3, np.float32), r"belongs \(width 0 by 7\.npy\)"),
        (8, np.zeros(4 * WIDTH, np.int64), r"8\.npy: holds int64"),
        (3, np.array([{"a": 1}], dtype=object), r"3\.npy: is no \.npy array of numbers"),
    ],
)
def test_an_array_that_does_not_fit_is_named(number: int, array: np.ndarray, said: str, tmp_path: Path) -> None:
    write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER))
    np.save(tmp_path / "openai" / f"{number}.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=said):
        import_byte_model(tmp_path / "openai", tmp_path / "ours")


def drop(tree: dict[str, Any], *path: str) -> None:
    *parents, last = path
    for parent in parents:
        tree = tree[parent]
    del tree[last]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: drop(t, "decoder"), r"tensor decoder\.weight is missing: a classifier's file lacks it"),
        (lambda t: drop(t, "encoder", "rnn", "rnns.0.w_mhh_v"), r"tensor rnn\.rnns\.0\.w_mhh_v is missing"),
        (lambda t: drop(t, "encoder", "rnn", "rnns.0.w_hh_g"), r"tensor rnn\.rnns\.0\.w_hh_g is missing"),
        (
            lambda t: t["encoder"]["rnn"].update({"rnns.0.w_ih_v": torch.zeros(3, INNER)}),
            r"w_ih_v has the shape \(3, 6\) where \(96, 6\) belongs",
        ),
        (lambda t: t["encoder"]["rnn"].update({"rnns.0.w_ho": torch.zeros(3)}), r"rnn\.rnns\.0\.w_ho is not of an mLSTM"),
        (lambda t: t["encoder"]["rnn"].clear(), r"has no layers"),
        (lambda t: t["decoder"].update(bias=torch.zeros(300)), r"decoder\.bias has 300 rows"),
    ],
)
def test_a_checkpoint_that_is_no_byte_model_is_refused(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    tree = copy.deepcopy(nvidia_tree(random_arrays(WIDTH, INNER)))
    change(tree)
    with pytest.raises(DataError, match=said):
        import_byte_model(save(tree, tmp_path / "model.pt"), tmp_path / "ours")


class Harm:
    """What a pickle can hold: reading it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_nothing_is_run_out_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a checkpoint of tensors alone"):
        import_byte_model(save({"encoder": Harm(tmp_path / "made")}, tmp_path / "model.pt"), tmp_path / "ours")
    assert not (tmp_path / "made").exists()
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(DataError, match="is not a checkpoint"):
        import_byte_model(tmp_path / "text.pt", tmp_path / "ours")
    with pytest.raises(DataError, match="does not exist"):
        import_byte_model(tmp_path / "absent.pt", tmp_path / "ours")


def test_norms_worked_into_the_matrices_change_nothing(tmp_path: Path) -> None:
    import_byte_model(write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)), tmp_path / "ours")
    model, settings = load_byte_model(tmp_path / "ours")
    plain = without_weight_norm(model, settings)
    assert not [name for name, _ in plain.named_parameters() if ".g." in name]
    ids = torch.tensor([list(TEXT)])
    with torch.no_grad():
        for one, other in zip(model.hidden(ids, None, torch.float32), plain.hidden(ids, None, torch.float32), strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


def test_an_imported_folder_says_what_it_holds_and_is_replaced_by_the_next(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    import_byte_model(write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)), ours)
    (ours / "tasks.jsonl").write_text("{}\n")
    (ours / "linear_probe").mkdir()
    import_byte_model(tmp_path / "openai", ours)
    assert (ours / "tasks.jsonl").exists() and (ours / "linear_probe").exists()  # the same model: its scores are still its own
    assert json.loads((ours / "config.json").read_text())["model"]["hidden_size"] == WIDTH
    assert "i, f, g, o" in (ours / "README.md").read_text()
    arrays = random_arrays(12, INNER, 5, False)
    import_byte_model(save(nvidia_tree(arrays), tmp_path / "model.pt"), ours)
    agrees(ours, arrays)
    assert not (ours / "tasks.jsonl").exists() and not (ours / "linear_probe").exists()  # scores of the model that was there
    (ours / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'thesis\.txt', which no export wrote"):
        import_byte_model(tmp_path / "model.pt", ours)


def test_a_folder_with_only_a_readme_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'README\.md', which no export wrote"):
        import_byte_model(write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)), tmp_path / "own")
    assert (tmp_path / "own" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("kind", ["mlstm", "lstm", "lstm with weight norm", "transformer"])
def test_the_readme_of_an_export_names_every_tensor_and_no_other(kind: str, label: bool) -> None:
    model: Any = CausalLMConfig(num_layers=2, hidden_size=8, num_heads=2, max_position_embeddings=16)
    if kind != "transformer":
        model = RecurrentLMConfig(kind=kind[:5].strip(), num_layers=2, hidden_size=8, embedding_size=4, weight_norm=" " in kind)  # type: ignore[arg-type]
    names = [re.sub(r"\.\d+\.", ".N.", name) for name in byte_model(model, label=label).state_dict()]
    text = byte_readme(model.kind, byte_model(model, label=label).state_dict())
    listed = [name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`(.*?)`", row)]
    # `.bias` behind a weight is its bias.
    listed = [listed[place - 1].replace("weight", "bias") if name == ".bias" else name for place, name in enumerate(listed)]
    assert {name for name in listed if ".g." not in name} == {name for name in names if ".g." not in name}
    assert ("`layers.N.g.w_x` and so on" in text) is (" " in kind) and ("i, f, g, o" in text) is (kind != "transformer")


def test_a_folder_that_holds_no_byte_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run folder"):
        load_byte_model(tmp_path)
    import_byte_model(write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)), tmp_path / "ours")
    weights = tmp_path / "ours" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"model\.safetensors: cannot be read"):
        load_byte_model(tmp_path / "ours")
    tree = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**tree, "model": {"kind": "bert"}, "data": {"tokenizer": "wordpiece"}}))
    with pytest.raises(ConfigError, match="is not a byte model"):
        load_byte_model(tmp_path / "ours")


def test_weights_of_another_size_than_the_settings_are_refused(tmp_path: Path) -> None:
    import_byte_model(write_openai(tmp_path / "openai", random_arrays(WIDTH, INNER)), tmp_path / "ours")
    path = tmp_path / "ours" / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 24', '"hidden_size": 36'))
    with pytest.raises(DataError, match="does not fit"):
        load_byte_model(tmp_path / "ours")
