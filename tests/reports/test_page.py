"""The page of a run: complete, readable without a network, and safe whatever modules are called."""

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from reports.test_run import PLAN, PROFILE, RUN, STATS

from ebbtide import Plan, Recipe, RegionPlan
from ebbtide._engine.stats import Stats
from ebbtide._profiling.timeline import Step, Timeline
from ebbtide._reports import pictures
from ebbtide._reports.page import _Comparison, run_page
from ebbtide._reports.run import Run
from ebbtide._utils.sizes import GIB, format_bytes

EVIL = """</td><script>alert("1")</script>'&$x$<img src=x onerror=y>"""


class Page(HTMLParser):
    """Tags with attributes, text by tag, and a check that tags are closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def html():
    return run_page(RUN)


def test_the_verdict_compares_peaks_and_names_what_holds_the_memory(html):
    found = re.search(r'class="verdict">([^<]*)<', html)[1]
    plain_bytes = sum(region.saved_bytes for region in PROFILE.regions) + PROFILE.base_bytes
    assert f"a peak of {format_bytes(GIB)} instead of " in found  # measured in step 1
    assert re.search(r"Largest part: [\d.]+ (GiB|MiB) from before the step\.", found)
    assert int(re.search(r"\((\d+)%\)", found)[1]) >= 100 * (1 - GIB / plain_bytes) - 1


def test_every_section_has_its_picture_or_table(html):
    page = Page(html)
    assert re.findall(r"<h2>([^<]*)</h2>", html) == [
        "What holds the memory", "Compute and copies", "Regions", "Time against memory", "Predicted and measured",
        "All figures of the run",
    ]  # fmt: skip
    labels = [each["aria-label"] for each in page.of("svg")]
    assert len(labels) == 7  # memory twice, lanes twice, the curve, times and peaks
    for name in PLAN.regions:
        assert f'<th scope="row">{name}</th>' in html
    for mark in ("this plan", "checkpointing", "smallest", "all kept"):
        assert f'<th scope="row">{mark}</th>' in html
    assert "beyond the picture: device (80.00 GiB)" in html
    assert "after step 0: plan in force" in html


def test_the_lanes_of_several_graphs_are_named_so_and_tiles_are_of_one():
    plan = dataclasses.replace(
        PLAN, regions={name: RegionPlan(recipe=Recipe("recompute", inputs="keep")) for name in PLAN.regions}
    )
    of_one, of_two = (
        run_page(dataclasses.replace(RUN, plan=plan, profile=dataclasses.replace(PROFILE, graphs=graphs)))
        for graphs in (1, 2)
    )
    assert "predicted step of" in of_one
    assert "predicted 4-graph step of" in of_two
    tiles = [re.search(r"recomputation</dt><dd>([^<]*)<", html)[1] for html in (of_one, of_two)]
    assert tiles[0] == tiles[1] != "0.0 ms"


def test_a_page_loads_nothing_and_runs_nothing(html):
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    references = [
        value for _, attributes in page.tags for name, value in attributes.items() if "href" in name or name == "src"
    ]
    assert all(reference.startswith("#") for reference in references)
    assert "url(" in html
    assert set(re.findall(r"url\((.)", html)) == {"#"}
    assert page.of("meta")[1]["content"].startswith("default-src 'none'")


def test_a_page_can_be_read_aloud_and_by_keys(html):
    page = Page(html)
    assert page.of("html")[0]["lang"] == "en"
    assert len(page.of("main")) == len(page.of("h1")) == len(page.of("title")) == 1
    assert all(each["role"] == "img" and each["aria-label"] for each in page.of("svg"))
    assert all(each.get("scope") in ("row", "col") for each in page.of("th"))
    assert len(page.of("caption")) == len(page.of("table")) > 3
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    scrolled = [attributes for _, attributes in page.tags if attributes.get("class") in ("scroll", "wide")]
    assert all(each["tabindex"] == "0" for each in scrolled)


def test_colours_are_those_of_the_page_in_the_light_and_in_the_dark(html):
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    rest = html.replace(style, "")
    dark = style[style.index("prefers-color-scheme:dark") :]
    for name, value in pictures.COLOURS.items():
        assert f"--{name}:{value};" in style
        assert value not in rest
        assert f"--{name}:#" in dark


def test_text_and_pictures_stand_out_from_their_background_in_the_light_and_in_the_dark(html):
    """As WCAG 2.1 demands at level AA: 4.5 to 1 for text, 3 to 1 for parts of pictures, with lines of a grid exempt."""
    light, dark = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1].split("prefers-color-scheme:dark")
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+):(#\w+)", scheme))
        assert colours.keys() == {"paper", "card", *pictures.COLOURS}
        for background in ("paper", "card"):
            ratios = {name: contrast(colours[name], colours[background]) for name in pictures.COLOURS}
            del ratios["faint"]
            assert ratios["ink"] >= 4.5
            assert min(ratios.values()) >= 3, ratios


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [value / 255 for value in bytes.fromhex(digits)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_names_are_shown_as_they_are_and_never_run():
    made_for = {"model": EVIL, "device": EVIL}
    regions = tuple(dataclasses.replace(each, name=each.name + EVIL) for each in PROFILE.regions)
    planned = {name + EVIL: dataclasses.replace(each, reason=EVIL) for name, each in PLAN.regions.items()}
    profile = dataclasses.replace(PROFILE, regions=regions, made_for=made_for, base={EVIL: 1})
    run = dataclasses.replace(
        RUN, made_for=made_for, profile=profile,
        plan=dataclasses.replace(PLAN, regions=planned, budget=EVIL), changes=(RUN.changes[0]._replace(what=EVIL),),
        report=EVIL,
    )  # fmt: skip
    by_hand = dataclasses.replace(run, plan=Plan({EVIL: RegionPlan("keep")}, status=EVIL), profile=None, steps=())
    for each in (run, by_hand):
        page = Page(run_page(each))
        assert not {"script", "img"} & {tag for tag, _ in page.tags}
        for tag in ("title", "h1", "th", "pre", *(("td", "li", "dd", "caption") if each is run else ("p",))):
            assert EVIL in page.text[tag], tag


def test_pictures_are_well_formed_with_a_name_of_any_kind():
    figure = pictures.pareto({"curve": [(GIB, 1.0)]}, {"mark": (GIB, 1.0)}, {"limit": GIB}, (GIB, 1.0), EVIL)
    drawn = pictures.svg(figure, "one", EVIL).replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ')
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == EVIL
    assert any(EVIL in "".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))


def test_runs_without_a_comparison_say_why():
    status = "no plan yet: measuring step 2 of 3"
    waiting = Run.of(STATS, {}, Plan({}, status=status))
    assert f"No comparison: {status}" in run_page(waiting)
    alone = Run.of(STATS, {"model": "offload_activations()"}, Plan({}))
    assert "1.00 GiB moved out over the run. No planner has measured a step" in run_page(alone)
    by_hand = Run.of(STATS, {}, Plan({"layers.0": RegionPlan("recompute")}))
    assert '<th scope="row">layers.0</th>' in run_page(by_hand)


def test_strange_figures_make_a_page_too():
    strange = (Step(1, 0.0, 0.0, 0, 0), Step(2, 1e99, 0.0, 10**99, 0))
    for profile in (dataclasses.replace(PROFILE, regions=()), PROFILE.at_speed(0.0)):
        run = dataclasses.replace(RUN, profile=profile, timeline=Timeline((), 0.0), steps=strange[:1])
        assert "no comparison" in run_page(run)
    assert pictures.lanes(Timeline((), 0.0), "nothing")
    assert pictures.steps([(s.number, s.seconds, 0.0) for s in strange], (), "any", "s", 1.0)


def test_a_run_that_saves_nothing_says_so():
    plain = dataclasses.replace(RUN, steps=(Step(1, 0.1, 0.1, 2**40, 2**40),))
    assert "saves next to nothing here" in _Comparison(plain, PROFILE).verdict


def test_ranks_are_in_the_title(html):
    assert "<title>ebbtide: small on none, rank 1 of 4</title>" in html
    assert "rank" not in run_page(Run.of(Stats(), {}, Plan({}))).split("</header>")[0]
