"""The page that `explain --graph` writes: every value in one box, nothing that dangles, and a real browser's view."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from browser import CONTRAST, DESK, PHONE, headless, show
from spellings import NEAR_MISSES, SPELLINGS, build
from tiny_vits import tiny_vit
from torch import Tensor, nn

from attnrewrite import api
from attnrewrite.cli.main import main
from attnrewrite.errors import Refusal
from attnrewrite.pages.graph.boxes import box_graph, module_paths
from attnrewrite.pages.graph.layout import layered
from attnrewrite.pages.graph.page import graph_page
from attnrewrite.pages.graph.region import projecting, shown, site_values
from attnrewrite.pages.graph.shapes import counted, cut, listed, ranges
from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import Scan, Untraced

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Gated(nn.Module):
    """[B, 16, 32] -> [B, 10]: two attentions, and a softmax over branches that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        self.head, self.gate = nn.Linear(32, 10), nn.Linear(10, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(tokens)[:, 0])
        return logits * self.gate(logits).softmax(-1)


class Hostile:
    """A graph whose modules and parameters are named to do harm."""

    def __init__(self, graph: GraphView) -> None:
        self.graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def scope(self, value: str) -> str:
        return self.graph.scope(value) + HOSTILE

    def title(self, value: str) -> str:
        return self.graph.title(value) + HOSTILE


@pytest.fixture(scope="module")
def gated() -> tuple[GraphView, Scan]:
    return api.examine(Gated().eval(), (torch.randn(1, 16, 32),))


ALL = {spelling.name: spelling for spelling in (*SPELLINGS, *(spelling for _, _, spelling in NEAR_MISSES))}


@cache
def examined(name: str) -> tuple[GraphView, Scan]:
    module, x = build(ALL[name])
    graph, found = api.examine(module, (x,))
    return shown(graph, found), found


@pytest.mark.parametrize("name", ALL)
def test_every_value_is_in_exactly_one_box_and_no_line_dangles(name: str) -> None:
    graph, found = examined(name)
    grouped = box_graph(graph, found)
    boxed = [value for box in grouped.boxes for value in box.values]
    assert sorted(boxed) == sorted(graph.values)
    assert [box.about for box in grouped.boxes if box.kind == "site"] == list(range(len(found.sites)))
    assert [box.about for box in grouped.boxes if box.kind == "miss"] == list(range(len(found.near_misses)))
    assert all(0 <= source < user < len(grouped.boxes) for source, user in grouped.edges), "not in order"
    owner = {value: place for place, box in enumerate(grouped.boxes) for value in box.values}
    live = [value for value in graph.values if not graph.is_constant(value)]
    flows = {(owner[o], owner[v]) for v in live for o in graph.operation(v).inputs if not graph.is_constant(o)}
    assert {(a, b) for a, b in flows if a != b} == {edge for edge in grouped.edges if edge[1] != len(grouped.boxes) - 1}


@pytest.mark.parametrize("name", [spelling.name for spelling in SPELLINGS])
def test_a_site_is_drawn_from_its_projections_to_its_output(name: str) -> None:
    graph, found = examined(name)
    for site in found.sites:
        values = site_values(graph, site)
        roles = {role for value in values for role in projecting(graph, value, site)}
        traced = dict(zip(("query", "key", "value", "output"), (*site.projections, site.output), strict=True))
        assert roles == {
            r for r, part in traced.items() if not isinstance(part, Untraced) and _is_live(graph, part.weight)
        }
        assert {value for value in site.nodes if graph.operation(value).kind in ("softmax", "sdpa")} <= values


class Detector(nn.Module):
    """A decoder of learned queries: what its first layer attends to is the same for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 16))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, memory: Tensor) -> Tensor:
        return self.decoder(self.queries.expand(memory.shape[0], -1, -1), memory)


def test_attention_among_learned_queries_is_drawn_as_any_other() -> None:
    graph, found = api.examine(Detector().eval(), (torch.randn(1, 5, 16),))
    assert [site.kind for site in found.sites] == ["self", "cross"] * 2
    grouped = box_graph(shown(graph, found), found)
    assert [box.about for box in grouped.boxes if box.kind == "site"] == [0, 1, 2, 3]
    boxed = [value for box in grouped.boxes for value in box.values]
    assert sorted(boxed) == sorted(graph.values)
    assert graph_page(graph, found, api.supported(found)).count('class="box site"') == 4


def test_sixteen_blocks_are_a_light_page() -> None:
    model, inputs = tiny_vit("softmax", depth=16)
    graph, found = api.examine(model, inputs)
    page = graph_page(graph, found, api.supported(found))
    assert page.count('class="box site"') == 16
    assert len(page.encode()) < 350_000


def _is_live(graph: GraphView, weight: str) -> bool:
    """Learned queries are projected once for all images: that projection is a constant, and told as one."""
    return any(not graph.is_constant(user) for user in graph.users(weight))


def test_modules_are_taken_apart_until_they_are_readable() -> None:
    scopes = [(f"{block}.{part}.{number}", f"blocks.{block}.{part}") for block in range(9)
              for part in ("mlp", "norm") for number in range(8)]  # fmt: skip
    paths = module_paths([*scopes, ("pool", "head"), ("sum", "")])
    assert set(paths.values()) == {*(f"blocks.{block}" for block in range(9)), ""}


SIZES = [(100.0, 40.0)] * 7
EDGES = [(0, 1), (1, 2), (0, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (0, 6)]


def test_layers_keep_the_order_and_boxes_do_not_overlap() -> None:
    layout = layered(SIZES, EDGES)
    for source, user in EDGES:
        assert layout.places[source][1] + 40 < layout.places[user][1]
    for first, second in pairwise(sorted(layout.places, key=lambda place: (place[1], place[0]))):
        assert first[1] < second[1] or first[0] + 100 < second[0]
    assert all(0 <= x <= layout.width - 100 and 0 <= y <= layout.height - 40 for x, y in layout.places)
    assert [(line.source, line.user) for line in layout.lines] == EDGES


def test_a_chain_is_straight_and_an_empty_graph_is_empty() -> None:
    layout = layered(SIZES[:4], [(0, 1), (1, 2), (2, 3)])
    assert len({x for x, _ in layout.places}) == 1
    assert layered([], []).places == ()


def test_words() -> None:
    assert ranges((0, 1, 2), 3) == "all 3 rows"
    assert ranges((4, 5, 6, 8), 9) == "rows 4–6, 8 of 9"
    assert ranges((5, 3, 1, 8, 6, 0), 9) == "6 of 9 rows, in 6 pieces from 0 to 8"
    assert (cut("abcdefgh", 8), cut("abcdefgh", 5)) == ("abcdefgh", "ab…gh")
    assert listed(["2 linear", "gelu", "add"], 14) == "2 linear, gelu, …"
    assert [counted(n, what) for n, what in ((1, "box"), (2, "near miss"), (1200, "site"))] == [
        "1 box", "2 near misses", "1,200 sites",
    ]  # fmt: skip


def test_names_are_escaped_wherever_they_stand(gated: tuple[GraphView, Scan]) -> None:
    page = page_of(gated)
    assert "<script>document" not in page
    assert "<img" not in page
    assert page.count("<script>") == 1


def page_of(examined: tuple[GraphView, Scan]) -> str:
    """The page of a model in which everything that can be named is named to do harm."""
    graph, found = examined
    found = replace(
        found,
        model=HOSTILE,
        sites=tuple(replace(site, name=f"{site.name}{HOSTILE}") for site in found.sites),
        near_misses=tuple(replace(miss, name=HOSTILE, sentence=HOSTILE, code=HOSTILE) for miss in found.near_misses),
    )
    supported = api.supported(found)
    supported["site1"] |= {"l1": Refusal("hostile", HOSTILE)}
    return graph_page(cast(GraphView, Hostile(graph)), found, supported)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(gated: tuple[GraphView, Scan], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "graph.html"
    path.write_text(page_of(gated))
    return path.as_uri()


def test_every_site_is_marked_and_nothing_harmful_runs(browser: Any, page: str, gated: tuple[GraphView, Scan]) -> None:
    show(browser, page, DESK)
    found = gated[1]
    assert len(browser.find_elements("css selector", ".box.site")) == len(found.sites) == 2
    assert len(browser.find_elements("css selector", ".box.miss")) == len(found.near_misses) == 1
    assert browser.find_element("tag name", "header").text.count("2 attention sites, 1 near miss") == 1
    assert browser.title.startswith("<script>")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_click_opens_a_site_with_its_projections(browser: Any, page: str, width: int) -> None:
    show(browser, page, width)
    panel = browser.find_element("id", "panel")
    assert not panel.is_displayed()
    browser.find_element("css selector", "nav button[data-id=site1]").click()
    assert panel.is_displayed()
    rows = [row.text for row in panel.find_elements("css selector", ".projections tbody tr")]
    assert [row.split()[0] for row in rows] == ["query", "key", "value", "output"]
    assert all("blocks.layers.1.self_attn.in_proj_weight" in row for row in rows[:3])
    assert "rows 32–63 of 96" in rows[1]
    assert "2 × 16" in panel.text
    assert "self_attn.out_proj.weight" in rows[3]
    assert "all 32 columns" in rows[3]
    variants = panel.find_element("css selector", ".variants").text
    assert "can stand here" in variants
    assert f"no: {HOSTILE}" in variants
    drawn = [each.text for each in panel.find_elements("css selector", ".node")]
    assert sum("q, k, v projection" in each for each in drawn) == 1
    assert sum("softmax(q·k) v" in each for each in drawn) == 1
    assert browser.get_log("browser") == []


def test_it_is_used_from_the_keyboard(browser: Any, page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, page, DESK)
    focused = "return document.activeElement.id"
    browser.find_element("tag name", "body").send_keys("/")
    assert browser.execute_script(focused) == "find"
    browser.find_element("id", "find").send_keys("near miss", Keys.ENTER)
    assert len(browser.find_elements("css selector", ".box:not(.dim)")) == 1
    assert browser.find_element("id", "shown").text.startswith("1 of ")
    box = browser.find_element("css selector", ".box.miss")
    box.send_keys(Keys.ENTER)
    assert browser.find_element("id", "panel").is_displayed()
    assert browser.execute_script("return location.hash") == "#miss0"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not browser.find_element("id", "panel").is_displayed()
    assert browser.execute_script(focused) == "miss0"
    browser.switch_to.active_element.send_keys(Keys.ARROW_UP)
    assert browser.execute_script(focused) != "miss0"


def test_an_address_opens_its_site(browser: Any, page: str) -> None:
    show(browser, f"{page}#site0", DESK)
    assert browser.find_element("id", "site0").get_attribute("aria-expanded") == "true"
    graph, box = (browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", element) for element in
                  (browser.find_element("id", "graph"), browser.find_element("id", "site0")))  # fmt: skip
    assert graph["top"] <= box["top"] < box["bottom"] <= graph["bottom"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(browser: Any, page: str, scheme: str) -> None:
    show(browser, f"{page}#site0", DESK, scheme)
    assert min(browser.execute_script(CONTRAST)["ratios"]) >= 4.5
    assert browser.execute_script("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0


SIZE = ["--input-size", "3x16x16"]


def test_the_command_writes_the_page_and_prints_json_alone(
    capsys: pytest.CaptureFixture[str], models_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "graph.html"
    command = ["explain", f"{models_file}:vit", *SIZE, "--graph", str(out)]
    assert main([*command, "--json", "--dry-run"]) == 0
    assert not out.exists()
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == ["model", "frontend", "sites", "near_misses", "groups"]
    assert printed.err == f"written: {out}\n"
    assert out.read_text().count('class="box site"') == 2
    assert main(command) == 2
    assert capsys.readouterr().err.endswith("exists: choose another file, or replace it with --force\n")
    assert main([*command, "--force"]) == 0


def test_a_bad_place_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "nothing.py:vit", "--graph", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"attnrewrite: error: {tmp_path} is a folder: give the name of a file to write in it\n"
    )


def test_a_model_without_attention_is_drawn_too(
    capsys: pytest.CaptureFixture[str], models_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "graph.html"
    assert main(["explain", f"{models_file}:gated", *SIZE, "--graph", str(out)]) == 3
    assert "holds no attention that can be rewritten; written:" in capsys.readouterr().err
    assert out.read_text().count('class="box miss"') == 1


def test_an_onnx_file_is_drawn_from_itself(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, inputs = tiny_vit("softmax")
    torch.onnx.export(model, inputs, tmp_path / "model.onnx", dynamo=True, verbose=False)
    graph, found = api.examine(tmp_path / "model.onnx")
    grouped = box_graph(shown(graph, found), found)
    assert sorted(value for box in grouped.boxes for value in box.values) == sorted(graph.values)
    page = graph_page(graph, found, api.supported(found))
    assert page.count('class="box site"') == len(found.sites) == 2
    assert all(name in page for site in found.sites for part in site.projections for name in part.parameters)
