"""The experiments run at a tiny size, and what is written from records is up to date."""

import json

import pytest

from experiments import config, records, tables, toy


def test_the_toy_study_writes_its_report(tmp_path, capsys):
    settings = toy.Config(
        particles=30, few=10, steps=3, chain_thin=2, variants=True, out=str(tmp_path)
    )
    page = toy.main(settings)
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("http-equiv", "")  # self-contained
    found = json.loads((tmp_path / "table.json").read_text())
    assert {r["config"]["sampler"] for r in found} >= {*toy.FIGURE_ROWS, "pi-SGLD, noise"}
    assert len(found) == 2 * 4 * 9
    for entry in found:
        assert entry["metrics"]["W2"] > 0
        assert len(entry["metrics"]["shares"]) == len(
            toy.DENSITIES[entry["config"]["density"]].regions
        )
        assert entry["seconds"] >= 0
    assert f"report: {page}" in capsys.readouterr().out.replace("\n", "")


def test_records_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    entry = records.record("some", {"a": 1}, 3, {"W2": 0.12345678, "shares": [1.0, 2.0]}, 1.23456)
    records.write(tmp_path / "some" / "x.jsonl", [entry, entry])
    assert records.read("some") == [entry, entry]
    assert entry["metrics"] == {"W2": 0.123457, "shares": [1.0, 2.0]}
    assert {"revision", "device", "versions", "seed", "seconds"} <= set(entry)


def test_tables_in_the_docs_come_from_the_records():
    tables.main(check=True)


def test_the_committed_study_shows_what_the_readme_says():
    """Mean of the seeds: three samplers find every mode within 30 % and beat the SGLD chain in W2."""
    found = records.read("toy")
    if not found:
        pytest.skip("no committed records of the toy study")
    for density in toy.DENSITIES:
        rows = {row[0]: row for row in toy.table(found, 2000, density)[1:]}
        chain = float(rows["SGLD"][1].split()[0])
        for sampler in ("w-SGLD-B", "SVGD", "pi-SGLD"):
            assert float(rows[sampler][1].split()[0]) < chain
            assert all(0.7 < float(share) < 1.3 for share in rows[sampler][5].split())


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--step=3", "did you mean --steps"),
        ("--steps=many", "expected int"),
        ("steps=3", "unknown setting"),
        ("--record=maybe", "expected true or false"),
        ("--help", "--particles=2000"),
    ],
)
def test_bad_settings_end_with_a_message(argument, words):
    with pytest.raises(SystemExit) as caught:
        config.parse(toy.Config, [argument])
    assert words in str(caught.value)


def test_settings_are_typed():
    settings = config.parse(toy.Config, ["--steps=7", "--record", "--gamma=0.5"])
    assert (settings.steps, settings.record, settings.gamma) == (7, True, 0.5)
