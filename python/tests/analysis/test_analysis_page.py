import json
from pathlib import Path

import pytest

from cutloss.analysis import __main__ as command
from cutloss.analysis import tables

PAGE = Path(__file__).parents[3] / "docs" / "analysis.md"


def kept():
    return {path.stem: json.loads(path.read_text()) for path in tables.names(PAGE.with_suffix(""))}


def test_the_page_tells_other_numbers_than_the_kept_files():
    page = PAGE.read_text()
    assert tables.render(page, kept()) == page, "run python -m cutloss.analysis --render docs/analysis.md"


def test_a_number_lands_in_another_row_or_column():
    name, result = next(iter(kept().items()))
    at = result["settings"]["exponents"].index(16)
    tile = next(e for e in result["errors"] if e["method"] == "tile")
    tile["kept"][at], tile["d_e"][at]["relative"], tile["d_c"][at]["rows_with_nothing"] = 0.123, 4.5e-3, 0.678
    page = tables.render("<!-- study: begin --><!-- study: end --><!-- tables: begin --><!-- tables: end -->", {name: result})
    row = next(line for line in page.splitlines() if line.startswith("| tile, 2^-16"))
    cells = [cell.strip() for cell in row.split("|")]
    assert (cells[2], cells[3], cells[8]) == ("12.3 %", "4.5e-03", "67.8 %")
    for tolerance in result["tolerances"]:
        tolerance["d_c"] = {"relative": 7.7e-7, "rows_with_nothing": 0.5}
    page = tables.render(page, {name: result})
    assert "| 7.7e-07 | 50 % |" in page and "dC | rows of dC with nothing |" in page


def test_before_and_after_a_run_are_columns_among_the_texts_or_change_places():
    name, result = next(iter(kept().items()))
    after = json.loads(json.dumps(result))
    after["nll"], after["record"]["steps"] = 1.25, 40
    marks = "".join(f"<!-- {part}: begin --><!-- {part}: end -->" for part in ("study", "training", "tables"))
    page = tables.render(marks, {name: result, "tuned-before": result, "tuned-after": after})
    study, training, rest = (page.split(f"<!-- {part}: begin -->")[1] for part in ("study", "training", "tables"))
    assert "tuned" not in study.split("<!--")[0] + rest
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in training.splitlines() if line[:1] == "|"]
    assert head[1:] == ["tuned, before", "tuned, after 40 steps"]
    assert ["mean nll", f"{result['nll']:.2f}", "1.25"] in rows
    folder = [Path(f"{stem}.json") for stem in ("tuned-after", "tuned-before", name)]
    assert [path.stem for path in sorted(folder, key=tables.place)] == [name, "tuned-before", "tuned-after"]


def test_a_page_without_a_place_or_a_file_of_other_sections_is_rendered(tmp_path, capsys):
    with pytest.raises(ValueError, match="training: begin"):
        tables.render("no place", kept())
    result = next(iter(kept().values()))
    del result["variants"]
    with pytest.raises(ValueError, match="lacks 'variants'"):
        tables.render(PAGE.read_text(), {"a-english": result})
    (tmp_path / "page.md").write_text(PAGE.read_text())
    assert command.main(["--render", str(tmp_path / "page.md")]) == 2
    assert "no *.json there" in capsys.readouterr().err
