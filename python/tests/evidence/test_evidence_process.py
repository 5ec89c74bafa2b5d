"""A point's process that works, crashes, hangs, grows or is refused: there is a record of each."""

import sys
import textwrap
import threading
import time

import made
import pytest

from cutloss.evidence import process, worker

REFUSAL = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.33G of 15.75G hbm. \
Exceeded hbm capacity by 4.58G.

Total hbm usage >= 21.36G:
    reserved        1.03G
    program        20.33G

Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_type="broadcast" op_name="jit(_train_step)/jvp(mul)" source_file="/home/someone/tunix/peft_trainer.py"
     Shape: f32[16,511,262144]{2,1,0:T(8,128)}
     Unpadded size: 7.98G
     XLA label: fusion.1 = fusion(...)
     ==========================

  2. Size: 320.00M
     Shape: bf16[262144,640]{1,0:T(8,128)(2,1)}
     XLA label: copy.7 = copy(param)
     ==========================
"""


def run(tmp_path, body, timeout=20.0, host_bytes=None):
    script = tmp_path / "worker.py"
    script.write_text("import json, os, sys, time\n" + textwrap.dedent(body))
    return process.run(made.point(), timeout, host_bytes, [sys.executable, str(script)])


def test_the_result_becomes_the_record(tmp_path):
    record = run(tmp_path, """
        open(sys.argv[2], "w").write(json.dumps({"outcome": "ok", "message": "", "seconds": {"compile": 2.0}, "planned": {}}))
    """)
    assert record["outcome"] == "ok" and record["seconds"]["compile"] == 2.0 and record["seconds"]["total"] > 0
    assert record["key"] == made.point().key


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit('no such model /root/x/y.py')", "exit 1: no such model y.py"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_a_crash_is_a_record_with_the_last_words(tmp_path, body, text):
    record = run(tmp_path, body)
    assert record["outcome"] == "failed" and text in record["message"]


def test_a_hanging_point_is_given_up(tmp_path):
    start = time.monotonic()
    record = run(tmp_path, "time.sleep(60)", timeout=0.5)
    assert record["outcome"] == "timeout" and "--timeout" in record["message"] and time.monotonic() - start < 10


def test_a_growing_point_is_given_up(tmp_path):
    record = run(tmp_path, "x = bytearray(b'1' * (200 << 20)); time.sleep(60)", host_bytes=100 << 20)
    assert record["outcome"] == "host-memory" and "--host-memory" in record["message"]


def test_an_interrupted_point_becomes_a_record(tmp_path):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(process.Stopped):
        process.run(made.point(), 30.0, None, [sys.executable, str(script)], stop=stop)
    assert time.monotonic() - start < 10


def test_a_worker_ends_with_its_parent(tmp_path):
    import subprocess

    program = (
        "import os, subprocess, sys, time\n"
        "code = 'import sys, time; from cutloss.evidence import worker; worker.end_with(int(sys.argv[1])); print(1); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.read(1); print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-u", "-c", program.replace("print(1)", "print(1, flush=True)")], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        try:
            state = open(f"/proc/{child}/stat").read().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it lives on")


def test_a_refusal_for_memory_is_read():
    found = worker.refusal(REFUSAL)
    assert found["outcome"] == "out-of-memory"
    assert found["needed"] == {"used_bytes": round(20.33 * 2**30), "limit_bytes": round(15.75 * 2**30)}
    assert [one["bytes"] for one in found["largest"]] == [8 * 2**30, 320 * 2**20]
    assert found["largest"][0]["array"] == "f32[16,511,262144]"
    assert "/home/someone" not in found["message"] and "peft_trainer.py" in found["message"]


def test_other_errors_are_not_called_out_of_memory():
    assert worker.is_out_of_memory(RuntimeError(REFUSAL))
    assert not worker.is_out_of_memory(ValueError("model: no such thing"))
