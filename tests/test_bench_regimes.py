"""What is made of softmax's figures: traffic counted by ncu, the table of regimes, the document."""

import re
from pathlib import Path

import numpy as np
import pytest

import benchmarks.fused
import benchmarks.memory_traffic
import benchmarks.memory_wall
import benchmarks.softmax_regimes
import benchmarks.traffic
import cuflash
from benchmarks.memory_traffic import Launched
from cuflash.bench import device, rows

pytest.importorskip("cupy")

from cuflash.device.occupancy import KNOWN_GPUS, Residency

ROOT = Path(__file__).resolve().parents[1]

NCU_HEAD = """\
==PROF== Connected to process 4321 (/usr/bin/python3.12)
==PROF== Profiling "naive_maximum" - 0: 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4321
"ID","Process ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"
"""
NAIVE = ("naive_maximum", "naive_normalizer", "apply")
#: Of 1000 elements: kernel, bytes read and written, sectors, percent of the warps.
LAUNCHES = (
    (NAIVE[0], 4000, 10, 125, 70.0),
    (NAIVE[1], 4000, 10, 125, 70.0),
    (NAIVE[2], 4000, 3980, 125, 70.0),
    ("void cuflash::fused<float, cuflash::Softmax<float>, 8>(cuflash::SoftmaxParameters)",
     4000, 4000, 125, 60.5),
    ("online", 5000, 4000, 250, 50.0),
    ("online", 8000, 4000, 250, 49.0),
)  # fmt: skip


def ncu_log(*launches: tuple[str, int, int, int, float]) -> str:
    """Return what ncu writes about launches."""
    lines = [NCU_HEAD]
    for i, (kernel, *values) in enumerate(launches):
        for metric, value in zip(benchmarks.memory_traffic.METRICS, values, strict=True):
            unit = "byte" if "bytes" in metric else "sector" if "sectors" in metric else "%"
            lines.append(f'"{i}","4321","{kernel}","(8, 1, 1)","{metric}","{unit}","{value:,}"\n')
    return "".join(lines)


def residency(method: str, trips: int, wave_bytes: int = 10**6) -> Residency:
    kernels = NAIVE if method == "naive" else (method,)
    return Residency(method, kernels, 1, 128, 10, 0.625, wave_bytes, trips, False)


LAUNCHED = (
    Launched("naive", 10, residency("naive", 4)),
    Launched("fused", 10, residency("fused", 2)),
    Launched("online", 10, residency("online", 2)),
    Launched("online", 1000, residency("online", 3, 10**9)),
)


def test_counts_are_read_from_ncu() -> None:
    counted = benchmarks.memory_traffic.parse(ncu_log(*LAUNCHES))
    assert [kernel for kernel, _ in counted] == [*NAIVE, "fused", "online", "online"]
    assert counted[2][1]["dram__bytes_write.sum"] == 3980
    naive, fused, short, long = benchmarks.memory_traffic.describe(LAUNCHED, counted, 1000)
    assert (naive["DRAM bytes an element"], naive["theory"], naive["absorbed"]) == (16, 16, 0)
    assert (naive["occupancy"], naive["resident"]) == ("", "")  # of three kernels there are three
    assert (fused["DRAM bytes an element"], fused["theory"], fused["absorbed"]) == (8, 8, "")
    assert (fused["occupancy"], fused["resident"]) == (0.605, 0.625)
    assert (short["DRAM read"], short["theory"], short["predicted"]) == (5, 12, 8)
    assert (short["absorbed"], short["wave MB"]) == (0.75, 1)
    assert (long["N"], long["rows"], long["absorbed"], long["L2 read"]) == (1000, 1, 0, 8)
    assert (long["predicted"], long["wave MB"]) == (12, 1000)


def test_elements_past_the_last_whole_row_do_not_count() -> None:
    counted = benchmarks.memory_traffic.parse(ncu_log(("fused", 3960, 3960, 1, 50.0)))
    launched = [Launched("fused", 99, residency("fused", 2))]
    (row,) = benchmarks.memory_traffic.describe(launched, counted, 1000)
    assert (row["rows"], row["DRAM read"], row["DRAM written"]) == (10, 4, 4)


def test_failures_of_ncu_are_told() -> None:
    parse, describe = benchmarks.memory_traffic.parse, benchmarks.memory_traffic.describe
    with pytest.raises(RuntimeError, match="LibraryNotLoaded"):
        parse("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n")
    with pytest.raises(RuntimeError, match="no number for dram__bytes_read"):
        parse(ncu_log(LAUNCHES[0]).replace('"4,000"', '"n/a"'))
    with pytest.raises(RuntimeError, match="ncu counted"):
        describe(LAUNCHED, parse(ncu_log(*LAUNCHES[:-1])), 1000)


def test_traffic_is_counted_by_a_run_under_ncu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "canned.csv").write_text(ncu_log(*LAUNCHES))
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f"""#!/bin/sh
echo "$@" > {tmp_path}/arguments
for last; do
    [ "$option" = --log-file ] && cp {tmp_path}/canned.csv "$last"
    option=$last
done
"""
    )
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = benchmarks.memory_traffic.count(1000, LAUNCHED)
    assert [(row["method"], row["N"]) for row in found] == [each[:2] for each in LAUNCHED]
    arguments = (tmp_path / "arguments").read_text()
    assert "regex:^(naive_maximum|naive_normalizer|apply|fused|online)$" in arguments
    assert arguments.endswith("--launch naive:10 fused:10 online:10 online:1000\n")

    ncu.write_text("#!/bin/sh\necho no permission >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="no permission"):
        benchmarks.memory_traffic.count(1000, LAUNCHED)
    ncu.unlink()
    monkeypatch.setattr(benchmarks.memory_traffic, "planned", lambda *problem: LAUNCHED)
    with pytest.raises(SystemExit):
        benchmarks.memory_traffic.main(["--results", str(tmp_path / "results")])
    assert "nothing was counted: ncu (NVIDIA Nsight Compute) is not" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("numpy_device")
def test_what_runs_under_ncu_launches_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, tuple[int, ...]]] = []

    def softmax(x: np.ndarray, *, method: str) -> None:
        launched.append((method, x.shape))

    monkeypatch.setattr(cuflash, "softmax", softmax)
    pairs = ["naive:4", "fused:16", "fused:10"]
    benchmarks.memory_traffic.main(["--elements", "64", "--launch", *pairs])
    assert launched == [("naive", (16, 4)), ("fused", (4, 16)), ("fused", (6, 10))]


def test_what_cannot_run_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(dtype: str, count: int, n: int, method: str) -> Residency:
        assert count == 2**20 // n
        if method == "cluster" or (method == "fused" and n > 100):
            raise ValueError
        return residency(method, 2)

    monkeypatch.setattr(device, "softmax_residency", predicted)
    planned = benchmarks.memory_traffic.planned(2**20, [10, 1000], [50, 200])
    assert [each[:2] for each in planned] == [
        ("naive", 10), ("fused", 10), ("online", 10),
        ("naive", 1000), ("online", 1000), ("fused", 50),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------- regimes

SHARES = {
    "device copy": {2: 1.0, 1024: 1.0, 4096: 1.0, 32768: 1.0, 2**20: 1.0, 2**24: 1.0},
    "naive": {1024: 0.47, 4096: 0.47, 32768: 0.47, 2**20: 0.47},
    "fused": {1024: 0.94, 4096: 0.90, 32768: 0.60},
    "online": {1024: 0.76, 4096: 0.72, 32768: 0.62, 2**20: 0.60, 2**24: 0.60},
    "cluster": {1024: 0.30, 4096: 0.60, 32768: 0.85},
    "auto": {2: 0.94, 1024: 0.94, 4096: 0.90, 32768: 0.85, 2**20: 0.55, 2**24: 0.60},
}


def timed_row(method: str, n: int, share: float, peer: str = "device copy") -> rows.Row:
    found = {
        "operation": "softmax",
        "method": method,
        "dtype": "float32",
        "N": n,
        "axis": "-1",
        "rows": 2**29 // n,
        "regime": {32768: "cluster", 2**24: "split"}.get(n, "fused"),
        "rate": 4.2 * share,
        "peer": peer,
        "speedup": share,
        "lower": 0.8 * share,
        "upper": 1.25 * share,
        **dict.fromkeys(rows.ENVIRONMENT, ""),
        "machine": "NVIDIA H200",
        "date": "a day",
    }
    return {name: str(value) for name, value in found.items()}


def timed() -> list[rows.Row]:
    """Return rows as softmax.csv holds them."""
    over_copy = [
        timed_row(method, n, share)
        for method, by_length in SHARES.items()
        for n, share in by_length.items()
    ]
    side_by_side = [
        {**timed_row(method, 512, share), "axis": "0", "regime": "columns"}
        for method, share in (("auto", 0.83), ("torch", 0.4))
    ]
    return [*over_copy, *side_by_side, timed_row("naive", 1024, 0.5, peer="fused")]


def counted() -> list[rows.Row]:
    """Return rows as memory_traffic.csv holds them."""
    launched = [*LAUNCHED, *(Launched("fused", n, residency("fused", 2)) for n in (8192, 30720))]
    launches = [*LAUNCHES, ("fused", 0, 0, 0, 60.0), ("fused", 0, 0, 0, 25.0)]
    counts = benchmarks.memory_traffic.parse(ncu_log(*launches))
    found = benchmarks.memory_traffic.describe(launched, counts, 2**17)
    return [{**{k: str(v) for k, v in row.items()}, "date": "another day"} for row in found]


def claims(counts: list[rows.Row]) -> list[rows.Row]:
    return benchmarks.softmax_regimes.table(KNOWN_GPUS["h200"], timed(), counts)


def of(found: list[rows.Row], statement: str) -> list[rows.Row]:
    chosen = [row for row in found if statement in row["claim"]]
    assert chosen
    return chosen


def test_statements_of_the_source_are_held_against_what_was_measured() -> None:
    found = claims(counted())
    (ratio,) = of(found, "fused is twice as fast")
    assert (ratio["source"], ratio["theory"], ratio["here"]) == (2.02, 2, 2)
    assert (ratio["lower"], ratio["upper"], ratio["holds"]) == (1.6, 2.5, True)
    assert (ratio["machine"], ratio["date"]) == ("NVIDIA H200", "a day")

    fast = of(found, "online passes the rate of DRAM")
    assert [row["N"] for row in fast] == [1024, 4096]
    assert fast[0]["here"] == pytest.approx(1.5 * 0.76)
    assert (fast[0]["source"], fast[0]["holds"], fast[1]["source"]) == (1.11, True, "")


def test_the_cliff_of_the_source_is_that_of_its_gpu() -> None:
    told = [row for row in of(claims([]), "without opt-in, Tesla T4") if row["source"] != ""]
    assert [(row["N"], row["source"], row["here"], row["holds"]) for row in told] == [
        (8192, 0.5, 0.5, True),
        (12288, 12288, 12288, True),
    ]
    here = {row["N"]: row["here"] for row in of(claims([]), "without opt-in, NVIDIA H200")}
    assert here[4096] == 1
    assert here[8192] == 0.75


def test_trips_are_those_predicted_or_the_statement_fails() -> None:
    found = of(claims(counted()), "as many trips")
    holds = {(row["method"], row["N"]): (row["predicted"], row["holds"]) for row in found}
    # Of 2**17 elements, 1000 elements' bytes are next to nothing.
    assert holds["fused", 10] == (2, False)
    whole = [{**row, "DRAM bytes an element": str(4 * 2.2)} for row in counted()]
    found = of(claims(whole), "as many trips")
    holds = {(row["method"], row["N"]): row["holds"] for row in found}
    assert holds["online", 10]
    assert not holds["online", 1000]
    assert found[0]["date"] == "another day"


def test_absorption_is_predicted_by_the_wave() -> None:
    shares = {10: "0.8", 1000: "0.8"}
    counts = [
        {**row, "absorbed": shares[int(row["N"])]} for row in counted() if row["method"] == "online"
    ]
    short, long = of(claims(counts), "while a wave of rows fits")
    assert (short["predicted"], short["here"], short["holds"]) == (1, 0.8, True)
    assert (long["predicted"], long["here"], long["holds"]) == (0, 0.8, False)
    assert long["quantity"] == "share absorbed, wave of 1000 MB"


def test_occupancy_falls_where_two_rows_no_longer_fit() -> None:
    limits = KNOWN_GPUS["h200"]
    cliff = benchmarks.softmax_regimes.cliff(limits)
    # Two blocks of 512 threads hold 8 chunks of 16 bytes a thread each; with 16 there is one.
    assert cliff == 512 * 8 * 4 + benchmarks.softmax_regimes.STEP
    *by_length, fall = of(claims(counted()), "occupancy of fused halves")
    assert [(row["N"], row["here"], row["holds"]) for row in by_length] == [
        (10, 0.605, True),
        (8192, 0.6, True),
        (30720, 0.25, False),
    ]
    assert (fall["predicted"], fall["here"], fall["holds"]) == (cliff, 30720, True)
    flat = [{**row, "occupancy": "0.6"} for row in counted()]
    *_, fall = of(claims(flat), "occupancy of fused halves")
    assert (fall["here"], fall["holds"]) == ("none", False)


def test_a_method_begins_where_it_is_never_slower_again() -> None:
    found = claims([])
    assert {row["method"]: row["here"] for row in found if " follows " in row["claim"]} == {
        "cluster": 32768,
        "online": 2**20,
    }
    (split,) = of(found, "few long rows")
    assert (split["N"], split["here"], split["quantity"]) == (
        2**24,
        0.6,
        "share of the copy's rate, 32 rows",
    )
    fastest = of(found, "auto takes the fastest")
    assert [(row["method"], row["N"], row["holds"]) for row in fastest] == [
        ("fused", 1024, True),
        ("fused", 4096, True),
        ("cluster", 32768, True),
        ("online", 2**20, False),
        ("online", 2**24, True),
    ]


# ------------------------------------------------------------------------------------ the document


def test_tables_are_put_between_their_marks() -> None:
    mark = "<!-- table: {} -->\n{}<!-- /table -->\n"
    document = "a\n" + mark.format("one", "old\n") + "b\n" + mark.format("two", "")
    made = {"one": "| new |\n", "two": "| 2 |\n"}
    filled = benchmarks.memory_wall.fill(document, made)
    assert filled == "a\n" + "b\n".join(mark.format(name, made[name]) for name in made)
    assert benchmarks.memory_wall.fill(filled, made) == filled
    assert benchmarks.memory_wall.fill(filled, {"one": "", "three": ""}) == filled.replace(
        made["one"], ""
    )


def test_every_table_of_the_documents_is_made() -> None:
    made = {
        *benchmarks.memory_wall.tables([], [], []),
        *benchmarks.fused.tables([]),
        *benchmarks.traffic.tables([]),
    }
    named = [
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())
    ]
    assert set(named) == made


def test_tables_of_the_document() -> None:
    made = benchmarks.memory_wall.tables(timed(), counted(), claims(counted()))
    walk = made["walk"].splitlines()
    assert walk[0].startswith("| N | naive | fused | online | cluster | auto | torch |")
    assert walk[2].startswith("| 1024 | 0.47 | 0.94 | 0.76 | 0.30 | 0.94 |")
    assert walk[-2].startswith("| 1048576 | 0.47 |  | 0.60 |  | 0.55 |")
    assert walk[-1].startswith("| 16777216 |  |  | 0.60 |  | 0.60 |")
    assert walk[-1].endswith(" split |")
    assert "| 8192 | 32 | 50% | 75% | 62% | 60% |\n" in made["occupancy"]
    assert "| 1024 | naive's time over fused's | 2.02 | 2 | 2 | yes |" in made["claims"]
    assert made["regimes"].count("\n") == 4
    assert made["across"] == (
        "| dtype | N | softmax | softmax, torch | softmax_vjp | softmax_vjp, torch |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| float32 | 512 | 0.83 | 0.40 |  |  |\n"
    )
    figure = "![Softmax: rates over row length](../benchmarks/results/nvidia-h200/softmax.png)\n"
    assert made["figure"] == figure
    assert made["dtypes"].startswith("| N | float32 | torch, float32 |\n")


def test_methods_that_hold_no_row_are_shown_where_both_were_timed_and_counted() -> None:
    shares = [timed_row("naive", 10, 0.5), timed_row("online", 10, 0.7)]
    assert not benchmarks.memory_wall.unheld(shares[:1], counted())
    (row,) = benchmarks.memory_wall.unheld(shares, counted())
    assert list(row.values())[:5] == [10, "0.50", "0.70", "0.1 of 16", "0.1 of 12"]


def test_without_a_run_no_table_is_filled_in() -> None:
    made = benchmarks.memory_wall.tables(timed(), counted(), [])
    assert set(made.values()) == {benchmarks.memory_wall.PENDING}


@pytest.mark.parametrize("name", ["memory-wall.md", "kernels.md"])
def test_the_document_is_that_of_the_results(name: str) -> None:
    results = ROOT / "benchmarks" / "results" / "nvidia-h200"
    read = [
        rows.read_rows(results / f"{subject}.csv")
        for subject in ("softmax", "memory_traffic", "softmax_regimes")
    ]
    document = (ROOT / "docs" / name).read_text()
    assert "<!-- table: " in document
    assert benchmarks.memory_wall.fill(document, benchmarks.memory_wall.tables(*read)) == document


def test_the_table_and_the_document_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--device-like", "h200", "--results", str(tmp_path / "results")]
    with pytest.raises(SystemExit):
        benchmarks.softmax_regimes.main(command)
    assert "no softmax.csv" in capsys.readouterr().err
    machine = {"machine": "NVIDIA H200"}
    rows.write_rows(tmp_path / "results", "softmax", timed(), machine)
    rows.write_rows(tmp_path / "results", "memory_traffic", counted(), machine)
    documents = [tmp_path / "document.md", tmp_path / "another.md"]
    for document in documents:
        document.write_text("<!-- table: walk -->\n<!-- /table -->\n")
    benchmarks.softmax_regimes.main([*command, "--document", *map(str, documents)])
    written = rows.read_rows(tmp_path / "results" / "nvidia-h200" / "softmax_regimes.csv")
    assert {row["machine"] for row in written} == {"NVIDIA H200"}
    assert of(written, "fused is twice as fast")[0]["here"] == "2"
    for document in documents:
        assert "| 1024 | 0.47 | 0.94 |" in document.read_text()
