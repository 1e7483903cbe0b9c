"""Samples are the model's, the same for the same seed, valid text whatever the bytes, and a held unit is held."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overnight.byte_lm.features import extract_features
from overnight.byte_lm.generate import Unit, generate
from overnight.byte_lm.heatmap import chosen_unit, unit_values
from overnight.config import CausalLMConfig
from overnight.errors import ConfigError, DataError, UserError
from overnight.interop.byte_models import import_byte_model, load_byte_model
from overnight.models.bytes import ByteModel, byte_model
from overnight.run_dir.task_results import append_result
from tests.interop.byte_formula import Arrays, random_arrays, read, write_openai

WIDTH = 24


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    found = random_arrays(WIDTH, 6)
    letters = [ord(c) for c in "abcdefghij "]
    found["bias"][letters] += 3
    found["decoder"][letters] *= 6  # what comes next depends on what was read
    return found


@pytest.fixture(scope="module")
def model(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> ByteModel:
    folder = tmp_path_factory.mktemp("model")
    import_byte_model(write_openai(folder / "openai", arrays), folder / "ours")
    return load_byte_model(folder / "ours")[0]


def text(model: ByteModel, prompt: str = "", length: int = 30, **options: object) -> str:
    return "".join(generate(model, prompt, length, **options))  # type: ignore[arg-type]


def test_temperature_0_takes_the_likeliest_byte_of_the_equations(model: ByteModel, arrays: Arrays) -> None:
    found = text(model, "go on: ", 20, temperature=0.0)
    written = b"\n go on: "
    for character in found.encode():
        assert character == read(arrays, written, "ifog")[2][-1].argmax()
        written += bytes([character])
    assert text(model, "go on: ", 20, temperature=0.0, seed=5) == found


def test_the_same_seed_writes_the_same_and_another_does_not(model: ByteModel) -> None:
    assert text(model, "x", seed=1) == text(model, "x", seed=1) != text(model, "x", seed=2)
    assert text(model, "x", seed=1) != text(model, "so it goes", seed=1)


def test_a_prompt_is_read_byte_by_byte_also_where_it_is_no_utf_8(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []
    real = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: (given.append(bytes(ids[0].tolist())), real(ids, *rest))[1])
    text(model, os.fsdecode(b"\xff\xfe abc \xc3\xa9"), 1)
    assert given == [b"\n \xff\xfe abc \xc3\xa9"]
    with pytest.raises(ConfigError, match=r"--prompt: character 2 is '\\ud83d', half of a surrogate pair, which is not text; leave it out"):
        text(model, "a\ud83d", 1)


def test_the_first_byte_has_the_probability_of_the_equations(model: ByteModel, arrays: Arrays) -> None:
    wanted = np.exp(read(arrays, b"\n q", "ifog")[2][-1] / 0.5)
    wanted /= wanted.sum()
    letters = [c for c in range(128) if wanted[c] > 0.02]
    drawn = [text(model, "q", 1, temperature=0.5, seed=seed) for seed in range(600)]
    for letter in letters:
        share = drawn.count(chr(letter)) / len(drawn)
        assert abs(share - wanted[letter]) < 5 * math.sqrt(wanted[letter] / len(drawn))
    assert letters


def test_bytes_that_are_no_text_become_a_sign_and_a_cut_character_too(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_ = "é€".encode() + b"\xff" + "ü".encode()[:1]
    wanted = iter(bytes_)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(wanted)]), 256).float()

    monkeypatch.setattr(model, "logits", logits)
    pieces = list(generate(model, "", len(bytes_), temperature=0.0))
    assert pieces == ["é", "€", "�", "�"]


def test_a_held_unit_is_held_after_every_byte(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = model.hidden

    def watched(ids: torch.Tensor, state: torch.Tensor, *rest: Any) -> object:
        assert ids.numel() == 1
        seen.append(float(state[0, -1, 1, 7]))
        return real(ids, state, *rest)

    free = text(model, "ab", 12, temperature=0.0)
    monkeypatch.setattr(model, "hidden", watched)
    clamped = text(model, "ab", 12, temperature=0.0, clamped=(Unit(7), 4.0))
    assert seen == [0.0] + [4.0] * (4 + 12 - 2)
    assert clamped != free


def test_what_the_weights_alone_decide_is_made_once(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = model.prepared, list[torch.dtype]()
    monkeypatch.setattr(model, "prepared", lambda dtype: made.append(dtype) or real(dtype))
    text(model, "ab", 12)
    assert made == [torch.float32]


def test_a_transformer_reads_all_of_its_text_again() -> None:
    model = byte_model(CausalLMConfig(num_layers=1, hidden_size=16, num_heads=2, max_position_embeddings=7)).eval()
    found = text(model, "ab", 9, temperature=0.0)
    written = list(b"\n ab")
    with torch.no_grad():
        for _ in range(9):  # by the last 7 bytes, which have a position
            hidden, _, _ = model.hidden(torch.tensor([written[-7:]]), None, torch.float32)
            written.append(int(model.logits(hidden[:, -1]).argmax()))
    assert found == bytes(written[4:]).decode("utf-8", "replace")
    with pytest.raises(ConfigError, match="no cells"):
        text(model, clamped=(Unit(0), 1.0))


def test_the_smallest_temperature_takes_the_likeliest_byte(model: ByteModel) -> None:
    likeliest = text(model, "go on: ", temperature=0.0)
    assert text(model, "go on: ", temperature=1e-308) == text(model, "go on: ", temperature=5e-324) == likeliest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clamped": (Unit(WIDTH), 1.0)}, "the model has units 0 to 23"),
        ({"clamped": (Unit(-1), 1.0)}, "units 0 to 23"),
        ({"temperature": -1.0}, "must be 0 or more"),
        ({"temperature": math.nan}, "must be 0 or more"),
        ({"length": 0}, "must be 1 or more"),
        ({"clamped": (Unit(3), math.nan)}, "--value = nan: must be a finite number"),
        ({"clamped": (Unit(3), 1e300)}, r"--value = 1e\+300: must be a finite number of float32"),
        ({"clamped": (Unit(3, "hidden"), 3e38)}, r"logits are not finite: --value = 3e\+38 is too large"),
        ({"seed": 99999999999999999999}, "--seed = 99999999999999999999: must be from -9223372036854775808 to 18446744073709551615"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], said: str, model: ByteModel) -> None:
    with pytest.raises(ConfigError, match=said):
        text(model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tanh", [False, True])
def test_every_character_has_the_value_after_its_last_byte(tanh: bool, model: ByteModel, arrays: Arrays) -> None:
    words = "Zoë<br>  saw &lt;i&gt; — 🙂"
    cells = read(arrays, "\n Zoë saw <i> — 🙂 ".encode(), "ifog")[0][:, 5]
    found = unit_values(model, words, Unit(5), tanh)
    assert "".join(character for character, _ in found) == "Zoë saw <i> — 🙂"
    end = 2
    for character, value in found:
        end += len(character.encode())
        assert value == pytest.approx(np.tanh(cells[end - 1]) if tanh else cells[end - 1], abs=5e-5)


def test_long_texts_are_read_window_by_window_and_an_empty_one_is_empty(model: ByteModel, arrays: Arrays) -> None:
    words = "so good " * 80
    cells = read(arrays, f"\n {words.strip()} ".encode(), "ifog")[0][:, 2]
    np.testing.assert_allclose([value for _, value in unit_values(model, words, Unit(2))], cells[2:-1], atol=5e-5)
    assert unit_values(model, " ", Unit(2)) == []


def test_a_held_hidden_state_is_what_the_next_byte_is_read_from(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(float(hidden[0, 7]))
        return real(hidden)

    free = text(model, "ab", 12, temperature=0.0)
    monkeypatch.setattr(model, "logits", watched)
    assert text(model, "ab", 12, temperature=0.0, clamped=(Unit(7, "hidden"), 0.75)) != free
    assert seen == [0.75] * 12


def test_a_hidden_unit_has_the_value_whose_mean_is_its_feature(model: ByteModel) -> None:
    values = [value for _, value in unit_values(model, "a good one", Unit(3, "hidden"))]
    with torch.no_grad():
        hidden, _, _ = model.hidden(torch.tensor([list(b"\n a good one ")]), None, torch.float32)
    np.testing.assert_allclose(values, hidden[0, 2:-1, 3], atol=1e-6)
    np.testing.assert_allclose(extract_features(model, [b"\n a good one "], "mean")[0, 3], hidden[0, :, 3].mean(), atol=1e-6)
    with pytest.raises(ConfigError, match="--tanh: applies to cells only, and the unit is hidden 3"):
        unit_values(model, "a good one", Unit(3, "hidden"), tanh=True)


def test_values_of_a_unit_and_features_that_are_not_finite_are_refused(model: ByteModel) -> None:
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        next(damaged.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="numbers that are not finite: it has diverged, or its weights are damaged"):
        unit_values(damaged, "a good one", Unit(3))
    with pytest.raises(UserError, match="numbers that are not finite"):
        extract_features(damaged, [b"a good one"])


def test_the_best_unit_is_the_one_that_the_newest_transfer_found_whatever_its_features(tmp_path: Path) -> None:
    assert chosen_unit(tmp_path, "17") == Unit(17, "cell")
    with pytest.raises(DataError, match="no linear probe on a task of two classes has found a best unit yet"):
        chosen_unit(tmp_path, "best")
    for of, state in (("mean", "hidden"), ("cell", "cell"), ("hidden", "hidden")):
        append_result(
            tmp_path / "tasks.jsonl",
            {
                "name": "sst",
                "config_hash": "",
                "value": 0.5,
                "metric": "accuracy",
                "kind": "linear_probe",
                "init": "pretrained",
                "unit": {"of": of, "number": 6},
            },
        )
        append_result(
            tmp_path / "tasks.jsonl",
            {"name": "sst", "config_hash": "", "value": 0.5, "metric": "accuracy", "kind": "linear_probe", "init": "pretrained"},
        )  # of three classes
        append_result(
            tmp_path / "tasks.jsonl",
            {
                "name": "sst",
                "config_hash": "",
                "value": 0.5,
                "metric": "accuracy",
                "kind": "linear_probe",
                "init": "random",
                "unit": {"of": "cell", "number": 8},
            },
        )
        append_result(tmp_path / "tasks.jsonl", {"name": "sst", "config_hash": "", "value": 0.5, "metric": "accuracy", "kind": "baseline"})
        assert chosen_unit(tmp_path, "best") == Unit(6, state)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a number or `best`"):
        chosen_unit(tmp_path, "first")


@pytest.mark.parametrize(
    ("nonzero", "said"), [(0, "gives no unit a weight, since none tells the classes apart"), (5, "has more than two classes")]
)
def test_a_linear_probe_without_a_best_unit_says_why_there_is_none(nonzero: int, said: str, tmp_path: Path) -> None:
    entry = {"kind": "linear_probe", "name": "sst", "value": 0.5, "init": "pretrained", "nonzero": nonzero}
    append_result(tmp_path / "tasks.jsonl", entry)
    with pytest.raises(DataError, match=f"the linear probe sst {said}.*; give --unit a number"):
        chosen_unit(tmp_path, "best")


@pytest.mark.parametrize("newest", ["step-0000010", "step-0000020"])
def test_a_best_unit_of_an_older_checkpoint_is_said_to_be(newest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"kind": "linear_probe", "name": "sst", "value": 0.5, "init": "pretrained", "checkpoint": "step-0000010"}
    append_result(tmp_path / "tasks.jsonl", entry | {"unit": {"of": "cell", "number": 6}})
    (tmp_path / "checkpoints" / newest).mkdir(parents=True)
    assert chosen_unit(tmp_path, "best") == Unit(6)
    older = "cell 6 is the best unit of step-0000010 according to the linear probe sst, but the newest checkpoint is step-0000020: run the linear probe again\n"
    assert capsys.readouterr().err == (older if newest == "step-0000020" else "")
