"""The data of explain's page: the tree of modules, the reasons, the drawn graphs, and that the file needs no other."""

import datetime
import json
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.comparisons import comparison
from torch import nn

import te_dynamo
from te_dynamo.inspect.page import render
from te_dynamo.inspect.page.data import page_data
from te_dynamo.inspect.page.layers import Layers
from te_dynamo.inspect.page.modules import module_rows
from te_dynamo.report import MatchRecord


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(4096), nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4096, 100)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def explanation():
    torch._dynamo.reset()
    with torch.device("meta"):
        net = Net().bfloat16()
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    return te_dynamo.explain(net, x, device="h200", options={"rules": [("head", None)]})


@pytest.fixture(scope="module")
def data(explanation):
    return page_data(explanation)


def record(module, **fields):
    return MatchRecord("linear", module, shape=("8", "8", "8"), flops=1024, dtype="bf16", **fields)


def tree(rows, indent=""):
    lines = []
    for row in rows:
        lines += [f"{indent}{row['name']}: {row['taken']} of {row['linears']} {row['runs']} {row['reason']}".rstrip()]
        lines += tree(row["rows"], indent + "  ")
    return lines


def drawn(graph):
    return [f"{node['kind']:8} {node['group']:9} {node['label']}".replace("\n", " | ") for node in graph["nodes"]]


def test_equal_layers_are_one_row(data):
    assert_expected_inline(
        "\n".join(tree(data["modules"])),
        """\
layers: 8 of 8
  0-3, alike (4): 8 of 8
    gelu: 0 of 0 te.gelu
    up: 4 of 4 float8_current_scaling
    down: 4 of 4 float8_current_scaling
    norm: 0 of 0 te.rms_norm
head: 0 of 1 bf16 (left) rule 'head' leaves it in the model's precision""",
    )


def test_a_layer_that_differs_has_a_row():
    rows = [record(f"layers.{i}.fc", recipe="mxfp8") for i in range(5)]
    rows[2] = record("layers.2.fc", matched=False, reason="rule 'layers.2' leaves it")
    assert_expected_inline(
        "\n".join(tree(module_rows(rows))),
        """\
layers: 4 of 5
  0-1.fc, alike (2): 2 of 2 mxfp8
  2.fc: 0 of 1 bf16 (left) rule 'layers.2' leaves it
  3-4.fc, alike (2): 2 of 2 mxfp8""",
    )


def test_the_sums_of_a_folded_row_are_those_of_all_layers():
    (row,) = module_rows([record(f"layers.{i}.fc") for i in range(5)])
    assert (row["flops"], row["linears"], row["taken"], row["left"]) == (5 * 1024, 5, 5, 0)


def test_children_add_up_to_their_parents():
    records = [record(f"blocks.{i}.{j}.{name}") for i in range(2) for j in range(3) for name in ("up", "down")]
    rows = module_rows(records)
    assert rows[0]["flops"] == 12 * 1024
    while rows:
        rows, parents = [child for row in rows for child in row["rows"]], rows
        for parent in parents:
            for key in ("flops", "covered", "linears", "taken", "left") if parent["rows"] else ():
                assert parent[key] == sum(child[key] for child in parent["rows"])


def test_the_model_itself_and_two_calls_of_one_module_have_rows():
    rows = [record(""), record("fc"), record("fc")]
    assert [(row["name"], len(row["rows"])) for row in module_rows(rows)] == [("linear", 0), ("fc", 2)]


def test_reasons_are_grouped_with_their_share_of_flops(data):
    (group,) = data["reasons"]
    assert group["reason"] == "rule 'head' leaves it in the model's precision"
    assert (group["rows"], group["kinds"], group["first"]) == (1, "1 linear", "head")
    assert group["share"] == pytest.approx(100 / (8 * 8192 + 100))


def test_cards(data):
    assert_expected_inline(
        "\n".join(f"{title}: {value} ({detail})" for title, value, detail in data["cards"]),
        """\
Linear FLOPs in a recipe: 99.8% (8 of 9 linears, in float8_current_scaling)
Rows: 17 (9 linears, 8 norms and activations; they are 100.0% of the model's matrix FLOPs)
te operations a step: 52 (they read and write 9.2 GiB; how many kernels is not known: none was compiled for a GPU here)
Time of the linears, estimated: 11.63 ms (18.83 ms in the model's precision on an NVIDIA H200, 1.62x; 8 of 9 linears; norms and all else are not counted)
Graphs: 1 (0 graph breaks; no quantized weight is kept)""",
    )


@pytest.mark.h200_too
def test_a_run_without_a_gpu_has_no_times_and_says_how_to_have_them():
    found = page_data(te_dynamo.explain(nn.Linear(16, 16), torch.ones(16, 16)))
    assert not [card for card in found["cards"] if "Time" in card[0]]
    ((_, value, detail),) = [card for card in found["cards"] if card[0] == "On a GPU"]
    assert value == "no device named"
    assert detail == 'an NVIDIA H200 would take 1 of 1 linear, 100.0%; device="h200" or --device h200 gives the times'


@pytest.mark.parametrize(("device", "measured"), [("h100", True), ("l40s", False)])
def test_times_of_a_gpu_that_nobody_measured_say_so(device, measured):
    found = te_dynamo.explain(
        nn.Linear(4096, 4096).bfloat16(), torch.empty(8192, 4096).bfloat16().to("meta"), device=device
    )
    assert ("ms (never measured there) instead of " in found.headline) is not measured
    assert ("Time of the linears, estimated, never measured" in str(page_data(found)["cards"])) is not measured


def test_details_say_why_no_operation_has_a_kernel(explanation, data):
    assert data["empty"]["What runs each operation"].startswith("Not known, as no code was generated: ")
    assert "Not known, as no code was generated: " in render(explanation).partition("<script")[0]


def test_the_head_says_what_was_explained_where_and_when(data):
    head = data["head"]
    assert (head["model"], head["recipe"]) == ("Net", "float8_current_scaling")
    assert head["device"] == "as an NVIDIA H200 would run it"
    assert head["date"] == datetime.date.today().isoformat()
    assert head["versions"] == f"te_dynamo {te_dynamo.__version__}, torch {torch.__version__}"


def test_the_head_of_a_function_that_ran_here():
    torch._dynamo.reset()
    found = page_data(te_dynamo.explain(F.gelu, torch.ones(3), options={"codegen": "eager"}))
    assert (found["head"]["model"], found["head"]["device"]) == ("gelu", "CPU")


def test_stages_and_what_was_before_them(data):
    assert [stage["stage"] for stage in data["stages"]] == ["match", "joint", "forward", "backward"]
    assert all(stage["before"] for stage in data["stages"])


def test_equal_layers_are_drawn_once(data):
    forward = next(stage for stage in data["stages"] if stage["stage"] == "forward")
    assert_expected_inline(
        "\n".join(drawn(forward["before"])),
        """\
input              x
te       layers.0  te.rms_norm | 0.norm
te       layers.0  te.quantize | 0.up
te       layers.0  te.quantize | up.weight
te       layers.0  te.gemm | 0.up
te       layers.0  te.add_bias | 0.up
te       layers.0  te.activation | layers.0
te       layers.0  te.quantize | 0.down
te       layers.0  te.quantize | down.weight
te       layers.0  te.gemm | 0.down
te       layers.0  te.add_bias | 0.down
other    layers.0  aten.add | layers.0
other              aten.t | head
product            aten.addmm | head
other    layers.0  aten.view | 0.norm
output             return
layers             layers 1-3: alike | 36 operations""",
    )
    assert_expected_inline(
        "\n".join(drawn(forward["after"])),
        """\
input              x
fused    layers.0  te.rms_norm_quantize | 0.norm
te       layers.0  te.quantize | up.weight
te       layers.0  te.gemm | 0.up
fused    layers.0  te.activation_quantize | layers.0
te       layers.0  te.quantize | down.weight
te       layers.0  te.gemm | 0.down
fused    layers.0  te.add_rms_norm_quantize | layers.0
te       layers.1  te.quantize | up.weight
te       layers.1  te.gemm | 1.up
fused    layers.1  te.activation_quantize | layers.1
te       layers.1  te.quantize | down.weight
te       layers.1  te.gemm | 1.down
fused    layers.1  te.add_rms_norm_quantize | layers.1
te       layers.3  te.quantize | up.weight
te       layers.3  te.gemm | 3.up
fused    layers.3  te.activation_quantize | layers.3
te       layers.3  te.quantize | down.weight
te       layers.3  te.gemm | 3.down
other              aten.t | head
product            aten.addmm | head
other    layers.3  aten.view | 3.norm
other    layers.1  aten.view | 1.norm
other    layers.0  aten.view | 0.norm
output             return
layers             layers 2: alike | 7 operations""",
    )


def test_constants_of_layers_are_equal():
    """Each has a name of its own in the graph: _tensor_constant0, _tensor_constant1."""

    class WithConstant(Block):
        def forward(self, x):
            return super().forward(x) + torch.tensor([]).to(x).sum()

    torch._dynamo.reset()
    with torch.device("meta"):
        net = nn.Sequential(*(WithConstant() for _ in range(4))).bfloat16()
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    stages = page_data(te_dynamo.explain(net, x, device="h200"))["stages"]
    joint = next(stage for stage in stages if stage["stage"] == "joint")
    assert [node["label"] for node in joint["before"]["nodes"] if node["kind"] == "layers"] == [
        "layers 2: alike\n27 operations"
    ]


def test_every_layer_of_the_backward_graph_is_found(data):
    backward = next(stage for stage in data["stages"] if stage["stage"] == "backward")
    drawn_layers = {node["group"] for node in backward["after"]["nodes"]}
    assert any(node["kind"] == "layers" for node in backward["after"]["nodes"])
    assert len(drawn_layers - {""}) < 4
    assert all(node["module"] for node in backward["after"]["nodes"] if node["kind"] in ("te", "fused"))


def test_arrows_join_what_is_drawn(data):
    for stage in data["stages"]:
        for graph in (stage["before"], stage["after"]):
            ids = {node["id"] for node in graph["nodes"]}
            assert ids >= {end for edge in graph["edges"] for end in edge.split()}


def test_a_node_has_its_line_in_both_texts(data):
    forward = next(stage for stage in data["stages"] if stage["stage"] == "forward")
    node = next(node for node in forward["after"]["nodes"] if node["label"].startswith("te.gemm"))
    assert re.fullmatch(r"inspect/test_page_data\.py:\d+", node["source"])
    assert node["lines"][0].startswith("gemm: bf16[8192, 8192] = te.gemm(")
    assert node["type"] == "bf16[8192, 8192]"
    assert node["bytes"] == 8192 * 4096 + 8192 * 4096 + 4 + 4 + 2 * 8192 + 2 * 8192 * 8192


def test_layers_inside_of_layers_that_differ():
    nodes = [(f"{a}{b}", f"stages.{a}.blocks.{b}.fc", a) for a in range(2) for b in range(3)]
    layers = Layers(nodes)
    assert layers.group("00") == "stages.0.blocks.0"
    assert [label for _, label, _ in layers.rest()] == ["stages.0.blocks 1-2: alike", "stages.1.blocks 1-2: alike"]


def test_the_file_loads_nothing(explanation, tmp_path):
    explanation.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.findall(
        r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)=|@import|url\(\s*['"]?http|sourceMappingURL=""", page
    )
    assert "default-src 'none'" in page
    assert len(page) < 5_000_000


def test_names_are_escaped(tmp_path):
    torch._dynamo.reset()
    model = nn.Sequential()
    model.add_module("</script><b>bold</b>", nn.Linear(16, 10))
    te_dynamo.explain(model, torch.ones(16, 16), options={"codegen": "eager"}).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>bold" not in page
    assert page.count("</script>") == 8
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page).group(1)
    assert json.loads(text)["modules"][0]["path"] == "</script><b>bold</b>"


def test_a_comparison_is_a_tab(explanation, tmp_path):
    explanation.to_html(tmp_path / "page.html", comparison=comparison(["layers.0.up"]))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'data-tab="numerics"' in page and "Worst linear" in page


def test_a_model_without_linears(tmp_path):
    torch._dynamo.reset()
    te_dynamo.explain(torch.sin, torch.ones(3), options={"codegen": "eager"}).to_html(tmp_path / "page.html")
    assert "0 linears" in (tmp_path / "page.html").read_text(encoding="utf-8")
