"""`mambacl bench exports`: files that agree are timed beside ours."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from shipping_help import BACKBONES, needs

import mambacl.bench.exports
import mambacl.bench.others
from mambacl.bench.exports import OWN, RUNTIMES, bench_exports, markdown, quiet_rounds
from mambacl.bench.others import Others
from mambacl.bench.sizes import Case

SMALL = Case(BACKBONES["defocus"][0], (1, 2), options=BACKBONES["defocus"][1])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECONDS", "ROW_SECONDS"):
        monkeypatch.setattr(mambacl.bench.exports, name, 0.001)


@pytest.mark.slow
@pytest.mark.extras
def test_every_runtime_and_form_is_timed_beside_ours(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for to in RUNTIMES:
        needs(to)
    found, forms = bench_exports([SMALL], ("loop", "chunked"), 3, tmp_path / "a.json"), ("loop", "chunked")
    assert json.loads((tmp_path / "a.json").read_text()) == found and not found["remarks"]
    systems = [OWN, *((system, form) for form in forms for system in RUNTIMES.values())]
    assert [(row["system"], row["form"]) for row in found["rows"]] == 4 * systems
    assert [(row["threads"], row["batch"]) for row in found["rows"]][::5] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in found["rows"]:
        assert row["images_per_second"] > 0 and row["rounds"] >= 3
        assert (row["theirs_/_ours"] is None) == (row["system"] == "mambacl")
    assert {"vectors", "features", "cores"} <= set(found["machine"]) and "onnxruntime" in found["versions"]
    assert "ONNX Runtime" in capsys.readouterr().out and "| 1 | 2 |" in markdown(found)

    monkeypatch.setattr(mambacl.bench.exports, "compared", lambda *_: (1.0, 0.5, 0))
    wrong = bench_exports([SMALL], ("loop",), 3)
    assert len(wrong["remarks"]) == 4 and {row["system"] for row in wrong["rows"]} == {"mambacl"}


def test_disturbed_rounds_are_left_out(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, kept = count(), [0.0, 0.1, 0.2]

    def cores(_: Others) -> float:
        number = next(rounds)
        return 1.5 if number % 2 else kept[number // 2 % 3]

    monkeypatch.setattr(Others, "cores", cores)
    seconds, others = quiet_rounds({OWN: lambda: None, ("x", "loop"): lambda: None}, 3, 0.25)
    assert [len(each) for each in seconds.values()] == [3, 3] and next(rounds) == 5 and others == 0.1
    monkeypatch.setattr(Others, "cores", lambda _: 1.5)
    seconds, others = quiet_rounds({OWN: lambda: None}, 3, 0.25)
    assert len(seconds[OWN]) == 9 and others == 1.5  # it is said if no round was quiet


def test_cores_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stat"
    monkeypatch.setattr(mambacl.bench.others, "STAT", file)
    assert Others().cores() is None
    clock, own = iter((0.0, 2.0)), iter((10.0, 11.0))
    monkeypatch.setattr(mambacl.bench.others.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(mambacl.bench.others.time, "process_time", lambda: next(own))
    file.write_text("cpu  100 0 100 5000 50 0 0 0 70 0\ncpu0 1 1\n")
    others = Others()
    file.write_text("cpu  200 50 150 5010 90 20 10 20 90 0\ncpu0 1 1\n")
    assert others.cores() == pytest.approx((2.5 - 1.0) / 2)  # of 250 ticks, the process had 100, in two seconds


def rows(system: str, form: str, ratio: float | None) -> dict[str, Any]:
    base = {"model": "m", "threads": 1, "batch": 32, "images_per_second": 1234.5, "rounds": 9, "others": 0.1}
    return {**base, "system": system, "form": form, "theirs_/_ours": ratio}


def test_the_table_of_a_record() -> None:
    record = {
        "commit": "abc", "date": "2026-11-17T00:00:00+00:00", "machine": {"cores": 2, "vectors": "AVX2"},
        "versions": {"torch": "2.15.0", "onnxruntime": "1.31.1", "openvino": "2026.4.1"},
        "rows": [rows(*OWN, None), rows("ONNX Runtime", "loop", 2.0), rows("OpenVINO", "loop", 1.234)],
    }  # fmt: skip
    assert markdown(record).splitlines() == [
        "`mambacl bench exports`; commit abc; 2 cores with AVX2; PyTorch 2.15.0, ONNX Runtime 1.31.1, OpenVINO "
        "2026.4.1; 2026-11-17.",
        "",
        "| model | threads | batch | mambacl, images/s | ONNX Runtime loop | OpenVINO loop |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `m` | 1 | 32 | 1234 | 2 | 1.23 |",
    ]
    record["rows"][0]["others"] = 1.2  # a core was free
    assert "while other" not in markdown(record)
    for row in record["rows"]:
        row["threads"] = 2
    assert "while other programs took up to 1.2 cores from these; " in markdown(record)
