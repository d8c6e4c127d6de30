"""The example as a user runs it: a process of its own, judged by what it prints and draws."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support import forked

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
def test_a_model_is_finetuned_within_a_limit_by_one_option(tmp_path: Path) -> None:
    example = str(EXAMPLES / "finetune.py")
    done = forked.run(example, "--quick", "--device", "cpu", "--picture", "step.svg", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert "with goal: 6/6 steps" in done.stderr
    pattern = r"^(as it is|with goal) +([\d.]+) MiB +([\d.]+) MiB +(fits|does not fit) +\d+ ms +([\d.]+) +([\d.]+)$"
    rows = {name: rest for name, *rest in re.findall(pattern, done.stdout, re.MULTILINE)}
    plain, goal = rows["as it is"], rows["with goal"]
    assert (plain[2], goal[2]) == ("does not fit", "fits")
    assert float(goal[0]) <= float(goal[1]) < float(plain[0])
    # nothing that is packed changes an output, so the first losses are the same; then both learn, close to each other
    assert plain[3] == goal[3]
    assert float(goal[4]) < float(goal[3])
    assert float(goal[4]) == pytest.approx(float(plain[4]), rel=0.02)
    # the plan was reckoned, and was at work
    assert re.search(r"^memory goal: [\d.]+ MiB; held .* optimizer [\d.]+ MiB \(AdamW's, to come\)$", done.stdout, re.M)
    assert re.search(r"^  estimated peak of the step .*: it fits, for about [\d.]+ ms a step$", done.stdout, re.M)
    assert re.search(r"^  (recompute|int8, scaled per block of 64): \d+ tensors?, ", done.stdout, re.M)
    drawn = ElementTree.parse(tmp_path / "step.svg").getroot()
    paths = {entry.get("class"): entry.get("d", "") for entry in drawn.iter("{http://www.w3.org/2000/svg}path")}
    assert set(paths) == {"plain", "goal"}
    assert all(path.count("V") > 20 for path in paths.values())
    text = " ".join(filter(None, (entry.text for entry in drawn.iter("{http://www.w3.org/2000/svg}text"))))
    assert f"as it is: {plain[0]} MiB" in text
    assert f"with a goal: {goal[0]} MiB" in text
    assert f"the goal: {goal[1]} MiB" in text


def test_a_step_is_drawn_from_what_is_allocated_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune import PHASES, Run, picture, ticks, timeline

    events = [
        {"name": name, "cat": "user_annotation", "ts": 100 * index, "dur": 100} for index, name in enumerate(PHASES)
    ]
    changes = [(10, 1, 40), (50, 2, 8), (60, 9, -99), (150, 1, -40), (160, 3, 4), (250, 2, -8), (260, 3, -4)]
    events += [
        {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": count, "Device Type": 0}}
        for ts, address, count in reversed(changes)
    ]
    step = timeline(events, base=100, kind=0)
    assert step.peak == 148
    assert step.phases["forward"] == [(0.0, 100), (0.1, 140), (0.5, 148), (0.6, 148), (1.0, 148)]
    assert step.phases["backward"] == [(0.0, 148), (0.5, 108), (0.6, 112), (1.0, 112)]
    assert step.phases["optimizer"][-1] == (1.0, 100)
    assert timeline(events, base=100, kind=1).peak == 100
    run = Run(step, [1.0], 0.1, [])
    ElementTree.fromstring(picture(run, run, 130))
    assert ticks(34.4) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(176) == [0, 25, 50, 75, 100, 125, 150, 175]
    assert ticks(9) == list(range(10))
