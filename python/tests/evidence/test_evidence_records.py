"""The file of records after kills, edits and two sweeps at once."""

import json

import made
import pytest

from cutloss.evidence.records import Records, RecordsError, check, read


def write(path, *records):
    with Records(path) as store:
        for record in records:
            store.add(record)


def test_a_torn_last_line_is_dropped_and_the_next_record_is_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    first, second, third = (made.ok(made.point(batch)) for batch in (8, 16, 32))
    write(path, first, second)
    whole = path.read_bytes()
    for cut in (1, 17, len(whole) - len(whole.split(b"\n")[0]) - 2):
        path.write_bytes(whole[:-cut])
        assert [one["key"] for one in read(path)] == [first["key"]]
        write(path, third)
        assert [one["key"] for one in read(path)] == [first["key"], third["key"]]


def test_a_line_without_its_end_is_torn_even_if_it_parses(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, made.ok(made.point()))
    path.write_bytes(path.read_bytes()[:-1])
    assert read(path) == []


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, made.ok(made.point(8)), made.ok(made.point(16)))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0][:50], lines[1]]) + "\n")
    with pytest.raises(RecordsError, match="line 1"):
        read(path)


def test_two_sweeps_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "records.jsonl"
    with Records(path), pytest.raises(RecordsError, match="another sweep"), Records(path):
        pass
    with Records(path):  # and it is free again
        pass


@pytest.mark.parametrize("change", [{"outcome": "fine"}, {"seconds": None}, {"format": 2}, {"planned": None}, {"key": 3}])
def test_records_without_their_fields_are_not_written(tmp_path, change):
    record = made.ok(made.point()) | change
    with pytest.raises(RecordsError):
        check(record)
    with Records(tmp_path / "records.jsonl") as store:
        with pytest.raises(RecordsError):
            store.add(record)
    assert read(tmp_path / "records.jsonl") == []


def test_a_number_json_does_not_have_is_not_written(tmp_path):
    with Records(tmp_path / "records.jsonl") as store, pytest.raises(ValueError):
        store.add(made.ok(made.point()) | {"loss": float("nan")})
    assert read(tmp_path / "records.jsonl") == []


def test_records_say_how_they_were_made():
    record = made.ok(made.point(8, 1024, remat="BLOCK", fsdp=4))
    assert record["command"] == (
        "cutloss-evidence plan --model gemma3-270m --arm cutloss --batch 8 --context 1024 --remat BLOCK --fsdp 4"
    )
    assert record["versions"]["jax"] and record["date"].endswith("+00:00")
    json.dumps(record, allow_nan=False)
