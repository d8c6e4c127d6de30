"""The example as a user runs it: a process of its own, judged by what it prints; and what it measures with."""

import re
from pathlib import Path

import pytest
import torch

from tests.support import forked

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
def test_a_model_that_does_not_fit_without_packing_trains_with_it(tmp_path: Path) -> None:
    example = str(EXAMPLES / "train_packed.py")
    done = forked.run(example, "--quick", "--device", "cpu", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert "packed: 8/8 steps" in done.stderr
    pattern = r"^(plain|packed) +([\d.]+) MiB +([\d.]+) MiB +(fits|does not fit) +([\d.]+) +([\d.]+)$"
    rows = {name: rest for name, *rest in re.findall(pattern, done.stdout, re.MULTILINE)}
    plain, packed = rows["plain"], rows["packed"]
    assert (plain[2], packed[2]) == ("does not fit", "fits")
    assert plain[1] == packed[1]  # the limit
    assert float(packed[0]) < float(packed[1]) < float(plain[0])
    # packing changes no output, so the first losses are the same; then both learn, and end close to each other
    assert plain[3] == packed[3]
    assert float(packed[4]) < 0.75 * float(packed[3])
    assert float(packed[4]) == pytest.approx(float(plain[4]), rel=0.05)
    found = re.search(r"^packed tensors: (\d+) of \d+, ([\d.]+) MiB are saved as ([\d.]+) MiB$", done.stdout, re.M)
    assert found is not None, done.stdout
    assert int(found[1]) >= 8
    assert float(found[3]) < 0.5 * float(found[2])


def test_it_says_so_where_packing_is_not_what_makes_it_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from train_packed import MIB, Run, report

    def said(plain: Run, packed: Run, out_of_memory: bool | None = None) -> list[str]:
        status = report(plain, packed, 100 * MIB, out_of_memory)
        complaints = capsys.readouterr().err.splitlines()
        assert status == bool(complaints)
        return complaints

    big, small = Run(120 * MIB, [5.0, 3.0], []), Run(80 * MIB, [5.0, 3.1], [])
    assert said(big, small) == []
    assert said(big, small, True) == []
    assert said(big, small, False) == ["the plain run did not run out of memory within the limit"]
    assert said(big, big) == ["the packed run does not fit the limit"]
    assert said(small, small) == ["the plain run fits too: choose a lower --limit"]
    assert said(big, Run(80 * MIB, [5.0, 4.0], [])) == ["the last losses are more than 10% apart"]
    assert len(said(big, Run(80 * MIB, [5.0, float("nan")], []))) == 2


def test_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, of what is allocated and freed inside: known tensors, and one from outside that is freed inside."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from train_packed import MIB, Peak, measured

    outside, peak = torch.ones(MIB), Peak()
    with measured(torch.device("cpu"), peak):
        del outside
        first = torch.ones(MIB)
        second = first * 2
        del first
        third = torch.empty(MIB // 2)
        del second, third
    assert 8 * MIB <= peak.bytes < 8 * MIB + 4096
