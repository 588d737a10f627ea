import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from varuna.core.times import Interval
from varuna.extras.pictures.gantt import Panel, draw, simulated
from varuna.simulator.costs import LinkCosts, uniform
from varuna.simulator.step import simulate

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(picture: str) -> list[str]:
    """Paths that are bars."""
    return [path.get("d") or "" for path in ET.fromstring(picture).iter(f"{SVG}path") if path.get("stroke-width")]


def texts_of(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_every_action_is_a_bar_with_its_number() -> None:
    trace = simulate(uniform(2), micro_batches=3, policy="gpipe")
    picture = draw("One step", [simulated("GPipe", "by hand", trace)], unit="units")
    assert sum(line.count("h") for line in lines_of(picture)) == sum(map(len, trace.orders))
    numbers = [text for text in texts_of(picture) if text in ("0", "1", "2")]
    assert len(numbers) >= sum(map(len, trace.orders))
    assert {"One step", "GPipeby hand", "stage 0", "stage 1", f"{trace.step_s:g} units"} <= set(texts_of(picture))


def test_all_panels_share_one_time_axis() -> None:
    short = Panel("short", "", ((Interval("F", 0, 0.0, 1.0),),))
    long = Panel("long", "", ((Interval("F", 0, 0.0, 1.0), Interval("B", 0, 1.0, 4.0)),))
    picture = draw("Both", [short, long])
    forwards = [line for line in lines_of(picture) if line.startswith("M76 ")]
    assert len({re.sub(r" \S+h", "h", line) for line in forwards}) == 1  # equal but for their height


def test_thousands_of_bars_too_narrow_to_see_are_joined() -> None:
    trace = simulate(uniform(3, link=LinkCosts(latency_s=0.1)), micro_batches=3000)
    picture = draw("A long step", [simulated("varuna", "", trace)])
    assert sum(map(len, trace.orders)) > 20_000
    assert len(picture) < 60_000


def test_all_reduce_and_optimizer_end_the_step() -> None:
    costs = uniform(2)
    costs = replace(costs, stages=tuple(replace(s, allreduce_s=3.0) for s in costs.stages), optimizer_s=1.0)
    trace = simulate(costs, micro_batches=2)
    panel = simulated("with ends", "", trace)
    assert [bar.kind for bar in panel.rows[0][-2:]] == ["reduce", "optimizer"]
    assert panel.end_s == trace.step_s
    assert {"all-reduce", "optimizer"} <= set(texts_of(draw("", [panel])))


def test_titles_are_escaped() -> None:
    assert "a &lt;b&gt; &amp; c" in draw("a <b> & c", [Panel("x", "", ((Interval("F", 0, 0.0, 1.0),),))])


def test_nothing_to_draw_is_still_a_picture() -> None:
    assert ET.fromstring(draw("empty", [Panel("none", "", ())])).tag == f"{SVG}svg"
