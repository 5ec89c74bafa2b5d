"""The report from records alone: tables beside the published ones, one page that needs nothing else, a PDF."""

import csv
import re

import made
import pytest

from cutloss.evidence import programs, published, report, tables, texts
from cutloss.evidence.records import FORMAT, Records

GIB = made.GIB


def parity(step):
    return {"format": FORMAT, "kind": "parity", "key": f"parity gemma3-270m float32 b4x128 r16 seed0 step {step}", "step": step,
            "outcome": "ok", "message": "", "losses": {"default": 3.0 / step, "cutloss": 3.0 / step + 1e-7}, "norms": {},
            "cosine": 1 - 1e-12, "relative_difference": 1e-6, "seconds": {"total": 1.0}, "versions": {"jax": "0"},
            "date": "2026-01-01T00:00:00+00:00", "command": "cutloss-evidence parity"}  # fmt: skip


def quality(arm):
    answers = [{"source": f"text {k}", "reference": f"texte {k}", "answer": f"<b>{arm}</b> {k}"} for k in range(3)]
    score = {when: {"bleu": 1.0, "chrf": 20.0, "answers": 3} for when in ("before", "after")}
    return {"format": FORMAT, "kind": "quality", "key": f"quality {arm}", "arm": arm, "batch": 4, "context": 128, "steps": 3,
            "outcome": "ok", "message": "", "losses": [3.0, 2.0, 1.0], "evaluated": [[2, 2.5], [3, 2.25]], "quality": score,
            "step_seconds": 1.0, "planned_bytes": GIB, "peak_rss_bytes": 2 * GIB, "seconds": {"total": 1.0},
            "answers": {"before": answers, "after": answers}, "versions": {"jax": "0"}, "date": "2026-01-01T00:00:00+00:00",
            "command": "cutloss-evidence quality"}  # fmt: skip


RECORDS = [
    made.ok(made.point(16, 512, arm="default"), 12.5 * GIB),
    made.ok(made.point(16, 512), 4.5 * GIB),
    made.ok(made.point(16, 512, remat="BLOCK"), 1.6 * GIB),
    made.refused(made.point(16, 1024, arm="default")),
    made.ok(made.point(16, 1024), 9 * GIB),
    made.ok(made.point(16, 512, arm="scheme", tiles=(128, 8192)), 5 * GIB),
    made.ok(made.point(16, 512, arm="default", fsdp=4), 7 * GIB),
    made.ok(made.point(16, 512, fsdp=4), 2 * GIB),
    made.ok(made.point(16, 512, arm="default", fsdp=4, split=False), 11.3 * GIB),
    made.outcome(made.point(64, 512), "timeout"),
    parity(1),
    parity(2),
    quality("default"),
    quality("cutloss"),
    {**parity(1), "kind": "multihost", "key": "multihost 2x2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    with Records(place / "records.jsonl") as store:
        for record in RECORDS:
            store.add(record)
    from cutloss.evidence import cli

    assert cli.main(["report", "--records", str(place / "records.jsonl"), "--to", str(place / "out"), "--no-pdf"]) == 0
    return place / "out"


def rows(folder, name):
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_pressure_stands_beside_the_published_figures(folder):
    by = {(row["batch"], row["context"]): row for row in rows(folder, "pressure")}
    first, second = by["16", "512"], by["16", "1024"]
    assert (first["published default"], first["published CCE"]) == ("12.57", "4.98")
    assert (first["default"], first["cutloss"], first["cutloss, BLOCK remat"]) == ("12.5", "4.5", "1.6")
    assert second["default"] == "does not fit (20.33)" and second["cutloss"] == "9.0"
    assert rows(folder, "validation")[0]["difference"] == "-0.6 %"


def test_points_that_were_not_run_say_so(folder):
    """An empty cell would read as if nothing were asked; a table of nothing but empty cells as if all were done."""
    by = {(row["batch"], row["context"]): row for row in rows(folder, "pressure")}
    assert by["32", "2048"]["default"] == by["32", "2048"]["cutloss"] == "not run"
    assert by["32", "2048"]["cutloss, BLOCK remat"] == ""  # no sweep asks for it
    assert by["32", "2048"]["published CCE"] == "did not fit (28.88)"
    assert not (folder / "rank.csv").exists()
    done = {row["sweep"]: row for row in rows(folder, "coverage")}
    assert (done["pressure"]["points"], done["pressure"]["fit"], done["pressure"]["do not fit"]) == ("40", "3", "1")
    assert done["pressure"]["given up"] == "1" and done["pressure"]["the rest is run by"] == "cutloss-evidence pressure"
    assert done["v6e"]["fit"] == "0"


def test_differences_are_of_what_fits(folder):
    by = {(row["batch"], row["context"]): row for row in rows(folder, "pressure")}
    assert (by["16", "512"]["default to published"], by["16", "512"]["cutloss to published"]) == ("-0.6 %", "-9.6 %")
    same = [made.ok(made.point(16, 512, arm="default"), 12.5699 * GIB)]
    assert tables.validation(tables.plans(same)).rows[0][-1] == "+0.0 %"
    assert (by["16", "1024"]["default to published"], by["16", "1024"]["cutloss to published"]) == ("", "-6.7 %")


def test_the_wall_is_named_by_kind_of_bytes():
    mib = 2**20

    def buffer(size, array, of):
        return {"bytes": size * mib, "count": 1, "array": array, "of": of}

    record = made.ok(made.point(16, 512), 3 * GIB)
    record["largest"] = [
        buffer(500, "bf16[16,512,2048]", "copy-start"),  # a copy of what the MLP has
        buffer(300, "bf16[16,512,2048]", "layers/feed_forward/dot_general"),
        buffer(200, "bf16[16,512,4,512]", "gradient: layers/attention/log_softmax/reduce_max"),
        buffer(100, "bf16[16,512,640]", "layers/rms_norm/reduce_sum"),
        buffer(50, "f32[4,2048]", "_compiled/cond/branch_0_fun/add"),
        buffer(25, "s32[7]", "copy-start.3"),
    ]
    found = programs.by_kind(record)
    assert found == {"MLP": 800 * mib, "attention": 200 * mib, "norms, layers' inputs": 100 * mib, "loss": 50 * mib, "other": 25 * mib}
    table = programs.walls([(made.point(16, 512), record)])
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    # made.ok: 2 GiB of temporaries, 1 of arguments; what is listed and has a kind is 1150 MiB.
    assert (row["weights, adapters, moments"], row["MLP"], row["other"], row["most"]) == (1.0, 0.78, round(2 - 1150 / 1024, 2), "weights")
    record["planned"]["arguments"] = 0
    assert programs.walls([(made.point(16, 512), record)]).rows[0][-1] == "MLP"
    assert "MLP, 0.78 of 3.00 GiB" in " ".join(texts.summary([record], tables.all_of([record])))


def test_what_all_rows_share_is_said_once():
    table = tables.Table("t", "T", ["model", "chip", "rank", "batch", "none"], [["gemma3-270m", "v5e", 8, 1, None], ["gemma3-270m", "v6e", 8, 1, None]])
    assert table.brief() == ("Gemma 3 270M, rank 8", ["chip", "batch"], [["v5e", 1], ["v6e", 1]])


def test_the_readme_has_every_table_and_its_command(folder):
    page = (folder / "README.md").read_text()
    for table in tables.all_of(RECORDS):
        assert f"## {table.title}\n" in page and f"`{table.command}`" in page
    assert "| does not fit (20.33) |" in page and "| not run |" in page
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (folder / picture).is_file()


def test_a_split_batch_is_not_validated_by_a_whole_one(folder):
    """The published mesh rows computed the whole batch on each chip: only such a row of ours may stand for the method."""
    assert {row["mesh"]: row["ours"] for row in rows(folder, "validation")} == {"fsdp1-tp1": "12.5", "fsdp4-tp1": "11.3"}


def test_the_frontier_says_what_is_not_known(folder):
    (row,) = [row for row in rows(folder, "frontier") if row["mesh"] == "fsdp1-tp1" and row["batch"] == "16"]
    assert (row["default"], row["cutloss"], row["published default"]) == ("512 < 1024", "1024 +", "512")


def test_boundaries_compare_tokens_of_what_fits(folder):
    row = {row["mesh"]: row for row in rows(folder, "boundaries") if row["remat"] == "NONE"}["fsdp1-tp1"]
    # Published: 32768 tokens ran in three shapes, and did not at 16 x 2048.
    assert row["published, most tokens that ran"].split(":")[0] in ("32 x 1024", "64 x 512", "128 x 256")
    # 16 x 1024 is half of them, but nothing more was tried: that says nothing.
    assert (row["cutloss, most tokens that fit"], row["times the published tokens"]) == ("16 x 1024: 9.00 GiB", "")
    found = tables.plans([*RECORDS, made.refused(made.point(32, 1024), 20 * GIB), made.ok(made.point(32, 2048, remat="BLOCK"))])
    cells = {row[2]: row[-2:] for row in tables.boundaries(found).rows if row[1] == "fsdp1-tp1"}
    assert cells == {"NONE": ["32 x 1024: does not fit (20.00)", 0.5], "BLOCK": [None, 2.0]}


def test_the_frontier_compares_only_what_was_tried(folder):
    """512 that fit where 1024 was published is no half, if 1024 was not tried."""

    def times(*records):
        table = tables.frontier(tables.plans(records))
        return {row[3]: row[-1] for row in table.rows}[16]

    fits = made.ok(made.point(16, 512))
    assert times(fits) is None
    assert times(fits, made.refused(made.point(16, 768))) == "0.5"
    assert times(fits, made.ok(made.point(16, 4096, remat="BLOCK"))) == "4 at least"
    refused = made.refused(made.point(16, 4352, remat="BLOCK"))
    assert times(fits, made.ok(made.point(16, 4096, remat="BLOCK")), refused) == "4"


@pytest.mark.parametrize(
    ("tries", "want"),
    [([], None), ([(256, False)], "none < 256"), ([(256, True), (512, False), (1024, True)], "256 < 512"), ([(512, True)], "512 +")],
)
def test_brackets_are_below_every_refusal(tries, want):
    assert tables.bracket(tries) == want


def test_the_page_needs_nothing_else(folder):
    page = (folder / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page) and "<script" not in page and "@import" not in page
    assert page.count("data:image/png;base64,") == len(list(folder.glob("*.png"))) >= 4
    assert "<b>default</b>" not in page and "&lt;b&gt;default&lt;/b&gt; 0" in page  # answers are text, not HTML
    for table in tables.all_of(RECORDS):
        assert f'id="{table.name}"' in page


def test_the_summary_is_computed_from_the_records(folder):
    page = (folder / "report.html").read_text()
    assert "Gemma 3 270M 16 x 1024 on 1 v5e" in page  # opened
    assert "2.78 times" in page or "3.50 times" in page
    assert "1: gemma3-270m cutloss 64x512" in page and "(timeout)" in page
    worse = [made.ok(made.point(1, 256, arm="default"), GIB), made.ok(made.point(1, 256), 1.5 * GIB)]
    text = " ".join(texts.summary(worse, tables.all_of(worse)))
    assert "cutloss plans more than the default: 1 of 1" in text and "1.00 and 1.50 GiB" in text


def test_the_pdf_has_a_page_of_every_table(tmp_path):
    made_tables = [table for table in tables.all_of(RECORDS) if table.name in ("validation", "boundaries")]
    report.write_pdf(tmp_path / "report.pdf", RECORDS, made_tables, {})
    data = (tmp_path / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-") and data.rstrip().endswith(b"%%EOF")
    # The summary, of each table its words and its rows, and what is not shown.
    assert len(re.findall(rb"/Type /Page\b", data)) == 1 + 2 * 2 + 1


def test_the_index_names_every_file(folder):
    index = (folder / "README.md").read_text()
    for file in folder.iterdir():
        assert file.name == "README.md" or f"`{file.name}`" in index


def test_records_that_are_not_there_are_named(tmp_path, capsys):
    from cutloss.evidence import cli

    assert cli.main(["report", "--records", str(tmp_path / "none.jsonl"), "--to", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "torn.jsonl").write_text('{"key": "half a')
    assert cli.main(["report", "--records", str(tmp_path / "torn.jsonl"), "--to", str(tmp_path)]) == 2
    assert "no record" in capsys.readouterr().err


def test_published_figures_are_the_published_ones():
    planned, frontier = published.planned(), published.frontier()
    one = ("gemma3-270m", "fsdp1-tp1", 16, 512, 16)
    assert (planned[*one, "default"]["gib"], planned[*one, "cce"]["gib"]) == (12.57, 4.98)
    assert planned["gemma3-12b", "fsdp8-tp1", 4, 512, 16, "cce"] | {"source": ""} == {
        "model": "gemma3-12b", "mesh": "fsdp8-tp1", "batch": 4, "context": 512, "rank": 16, "arm": "cce", "fits": False,
        "gib": 17.31, "step_seconds": None, "source": "",
    }  # fmt: skip
    assert [frontier["gemma3-270m", "fsdp1-tp1", b, "cce"] for b in (8, 16, 32, 64, 128)] == [2048, 1024, 1024, 512, 256]
    assert frontier["gemma3-270m", "fsdp1-tp1", 64, "default"] is None
    assert all(row["source"].endswith(".csv") for row in published.table("planned"))

