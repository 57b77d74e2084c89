"""The regions of a model without names from the user."""

import pytest
import torch
from control.test_controller import SETTINGS, WIDTH, Block, batch
from support import assert_equal
from torch import nn

import ebbtide
from ebbtide import PlanError
from ebbtide._control.controller import Phase
from ebbtide._dry_run import measure
from ebbtide._model.regions import find_norm, find_regions, refuse_nested


class Norm(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)


class Stages(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x):
        for stage in self:
            x = stage(x)
        return x


class Level(nn.Module):
    """A container without a forward."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.empty = nn.ModuleList()


class Down(nn.Module):
    """A stage of a U-Net."""

    def __init__(self, count, make=Block):
        super().__init__()
        self.attentions = nn.ModuleList([Block()])
        self.resnets = nn.ModuleList([make() for _ in range(count)])
        self.samplers = nn.ModuleList([Block()])

    def forward(self, x):
        for part in (*self.resnets, *self.attentions, *self.samplers):
            x = part(x)
        return x


class Headed(nn.Module):
    """A block with a list of small parts."""

    def __init__(self, heads):
        super().__init__()
        self.heads = nn.ModuleList([Widening(2) for _ in range(heads)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return self.mlp(sum(head(x) for head in self.heads))


class Bottleneck(nn.Module):
    """A block of layers that differ."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Widening(width) for width in (8, 16, 8)))

    def forward(self, x):
        return self.layers(x)


class Widening(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x):
        return self.down(self.up(x))


class Deep(nn.Module):
    """A block of equal blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def listed(*modules):
    return nn.ModuleList(modules)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lambda: listed(Block(), Block()), ["0", "1"]),
        (lambda: listed(listed(Block(), Norm()), listed(Block(), Norm())), ["0.0", "0.1", "1.0", "1.1"]),
        (lambda: listed(listed(Block()), listed(Block())), ["0.0", "1.0"]),
        (lambda: listed(listed(Block(), Block())), ["0.0", "0.1"]),
        (lambda: listed(listed(listed(Block())), listed(listed(Block()))), ["0.0.0", "1.0.0"]),
        (lambda: listed(nn.ModuleDict({"a": Block()}), nn.ModuleDict({"b": Block()})), ["0.a", "1.b"]),
        (
            lambda: listed(Level(), Level()),
            ["0.norm", "0.blocks.0", "0.blocks.1", "1.norm", "1.blocks.0", "1.blocks.1"],
        ),
        (lambda: listed(Block(), Block(), listed(Norm(), Norm())), ["0", "1", "2.0", "2.1"]),
        (lambda: listed(Block(), Block(), listed(*(nn.Linear(8, 8) for _ in range(9)))), ["0", "1"] + [
            f"2.{k}" for k in range(9)
        ]),
        (lambda: listed(nn.Sequential(Block(), Block()), nn.Sequential(Block())), ["0.0", "0.1", "1"]),
        (lambda: listed(Down(2), Down(2), Down(3)), [
            *(f"{k}.{name}" for k in range(2) for name in ("attentions.0", "resnets.0", "resnets.1", "samplers.0")),
            "2.attentions.0", "2.resnets.0", "2.resnets.1", "2.resnets.2", "2.samplers.0",
        ]),
        (lambda: listed(Down(2), Down(2)), ["0", "1"]),
        (lambda: listed(Down(2, Bottleneck), Down(3)), [
            "0.attentions.0", "0.resnets.0", "0.resnets.1", "0.samplers.0",
            "1.attentions.0", "1.resnets.0", "1.resnets.1", "1.resnets.2", "1.samplers.0",
        ]),
        (lambda: listed(Down(2, Deep), Down(1)), [
            "0.attentions.0", *(f"0.resnets.{k}.blocks.{j}" for k in range(2) for j in range(2)), "0.samplers.0", "1",
        ]),
        (lambda: listed(Sparse(2), Sparse(3)), ["0", "1"]),
        (lambda: listed(Headed(2), Headed(3)), ["0", "1"]),
        (lambda: listed(Stages([Block()]), Stages([Block()])), ["0", "1"]),
        (lambda: listed(nn.ParameterList([torch.ones(2)]), nn.ParameterList([torch.ones(2)])), []),
        (lambda: listed(listed(nn.Linear(8, 8)), listed(nn.Linear(8, 8))), []),
        (lambda: nn.Sequential(Block(), Block()), ["0", "1"]),
        (lambda: nn.ModuleDict({"0": Block(), "1": Block()}), ["0", "1"]),
        (lambda: nn.ModuleDict({"a": Block(), "b": nn.Linear(8, 8)}), []),
        (lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), []),
    ],
)  # fmt: skip
def test_blocks_are_the_modules_that_forward_calls(module, names):
    model = nn.Module()
    model.front, model.inner = nn.Linear(8, 8), module()
    found = find_regions(model)
    assert list(found) == [f"inner.{name}" for name in names]
    assert list(found.items()) == [pair for pair in model.named_modules() if pair[0] in found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_block_is_called():
    assert list(find_regions(listed(torch.compile(Block()), torch.compile(Block())))) == ["0", "1"]
    assert list(find_regions(listed(*(torch.jit.script(Norm()) for _ in range(2))))) == ["0", "1"]


class Sparse(nn.Module):
    """A block with a mixture of experts."""

    def __init__(self, experts=1, name="experts"):
        super().__init__()
        self.norm = Norm()
        self.gate = nn.Linear(WIDTH, experts)
        self.add_module(name, listed(*(Block() for _ in range(experts))))

    def forward(self, x):
        chosen = self.gate(self.norm(x)).softmax(-1)
        experts = next(inner for inner in self.children() if isinstance(inner, nn.ModuleList))
        return x + sum(expert(x) * chosen[..., k : k + 1] for k, expert in enumerate(experts))


class Projected(Block):
    """A block with a list of one projection."""

    def __init__(self):
        super().__init__()
        self.out = listed(nn.Linear(WIDTH, WIDTH))
        self.mlp = listed(Block())

    def forward(self, x):
        return self.out[0](self.mlp[0](super().forward(x)))


class Stage(nn.Module):
    """A part of a model in a pipeline: missing parts are None."""

    def __init__(self, layers):
        super().__init__()
        self.embed, self.layers, self.head = None, layers, None

    def forward(self, x):
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lambda: Stage(listed(Block())), ["layers.0"]),
        (lambda: Stage(nn.ModuleDict({"7": Block()})), ["layers.7"]),
        (lambda: Stage(nn.Sequential(Block())), ["layers.0"]),
        (lambda: nn.Sequential(Block()), ["0"]),
        (lambda: listed(listed(Block(), Block(), Norm())), ["0.0", "0.1", "0.2"]),
        (lambda: Stage(listed(torch.compile(Block()))), ["layers.0"]),
        (lambda: holding(encoder=Stage(listed(Block())), decoder=Stage(listed(Block()))), [
            "encoder.layers.0", "decoder.layers.0"
        ]),
        (lambda: Stage(listed(Projected())), ["layers.0"]),
        (lambda: Stage(listed(Projected(), Projected())), ["layers.0", "layers.1"]),
        (lambda: Stage(listed(Sparse())), ["layers.0"]),
        (lambda: Stage(listed(Sparse(4))), ["layers.0"]),
        (lambda: Stage(listed(Sparse(4, "local_experts"))), ["layers.0"]),
        (lambda: Stage(listed(Sparse(4), Sparse(4))), ["layers.0", "layers.1"]),
        (lambda: nn.Sequential(Stage(listed(Block(), Block()))), ["0.layers.0", "0.layers.1"]),
        (lambda: holding(layers=blocks(), adapter=listed(Block())), ["layers.0", "layers.1"]),
        (lambda: holding(with_expert=Stage(blocks()), adapter=listed(Block())), [
            "with_expert.layers.0", "with_expert.layers.1"
        ]),
        (lambda: Sparse(), []),
        (lambda: Sparse(4), [f"experts.{k}" for k in range(4)]),
        (lambda: Stage(listed(nn.Linear(8, 8))), []),
        (lambda: Stage(nn.ModuleDict({"default": nn.Linear(8, 8)})), []),
        (lambda: Stage(listed(torch.compile(nn.Linear(8, 8)))), []),
        (lambda: Stage(listed(Norm())), []),
        (lambda: Stage(listed()), []),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), []),
        (lambda: Block(), []),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_only_block_of_a_list_is_a_region(module, names):
    assert list(find_regions(module())) == names


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}, {"recipe": "recompute"}, {"recipe": "selective"}])
@pytest.mark.parametrize("kind", ["list", "dict", "sequence", "the sequence itself", "experts"])
def test_a_stage_with_one_block_computes_the_same(kind, settings):
    def make():
        torch.manual_seed(0)
        return {
            "list": lambda: Stage(listed(Block())),
            "dict": lambda: Stage(nn.ModuleDict({"7": Block()})),
            "sequence": lambda: Stage(nn.Sequential(Block())),
            "the sequence itself": lambda: nn.Sequential(Block()),
            "experts": lambda: Stage(listed(Sparse(2))),
        }[kind]()

    model, twin = make(), make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    for k in range(5):
        assert_equal(*(_step(each, k, lambda out: out.square().mean()) for each in (model, twin)))
    assert len(handle.plan.regions) == 1
    assert "recipe" in settings or handle._planning.controller.phase is Phase.PLANNED
    assert handle.stats().recomputed.count > 0 or not settings


class Unet(nn.Module):
    """Levels are lists of blocks."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(listed(Block(), Norm()) for _ in range(2))

    def forward(self, x):
        for block, norm in self.levels:
            x = norm(block(x))
        return x.square().mean()


def make():
    torch.manual_seed(0)
    return Unet()


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
def test_lists_of_lists_are_planned(settings):
    model, twin = make(), make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    for k in range(5):
        ours, plain = (_step(each, k) for each in (model, twin))
        assert_equal(ours, plain)
    assert handle._planning.controller.phase is Phase.PLANNED
    assert list(handle.plan.regions) == ["levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"]
    assert all(region.forward_s > 0 for region in handle.profile.regions)


def _step(model, seed, loss_of=lambda loss: loss):
    model.zero_grad()
    x = batch(seed)
    loss = loss_of(model(x))
    loss.backward()
    return [loss.detach(), x.grad, *[p.grad for p in model.parameters()]]


def test_lists_of_small_layers_are_no_regions():
    model = nn.Module()
    model.inner = listed(listed(nn.Linear(8, 8)), listed(nn.Linear(8, 8)))
    with pytest.raises(PlanError, match="regions="):
        ebbtide.offload(model, **SETTINGS)


# -- the norm behind the blocks ----------------------------------------------------------------------------------------


class Rms(nn.Module):
    """A norm of a class unknown to torch."""


class OwnRmsNorm(Rms):
    pass


def holding(**modules):
    held = nn.Module()
    for name, module in modules.items():
        held.add_module(name, module)
    return held


def blocks():
    return listed(Block(), Block())


SHARED = Block()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: holding(layers=blocks(), norm=Norm()), "norm"),
        (lambda: holding(layers=blocks(), norm=nn.RMSNorm(8)), "norm"),
        (lambda: holding(layers=blocks(), norm=nn.GroupNorm(1, 8)), "norm"),
        (lambda: holding(layers=blocks(), drop=nn.Dropout(), last=OwnRmsNorm(), head=nn.Linear(8, 8)), "last"),
        (lambda: nn.ModuleDict({"embed": nn.Linear(8, 8), "layers": blocks(), "norm": Norm()}), "norm"),
        (lambda: holding(encoder=holding(layers=blocks()), norm=Norm()), "norm"),
        (lambda: holding(model=holding(layers=blocks(), norm=Norm()), norm=Norm()), "model.norm"),
        (lambda: holding(module=holding(layers=blocks(), norm=Norm())), "norm"),
        (lambda: holding(a=holding(layers=blocks(), norm=Norm()), b=holding(layers=blocks(), norm=Norm())), "b.norm"),
        (lambda: holding(a=holding(layers=blocks(), norm=Norm()), b=holding(layers=blocks())), None),
        (lambda: holding(layers=blocks(), norm=holding(inner=Norm())), None),
        (lambda: holding(norm=Norm(), layers=blocks()), None),
        (lambda: holding(layers=blocks(), last=Rms()), None),
        (lambda: holding(layers=blocks(), norm=Norm(), other_norm=Norm()), None),
        (lambda: holding(layers=listed(SHARED, Block()), norm=SHARED.norm), None),
        (lambda: nn.Sequential(Block(), Block(), Norm()), None),
        (lambda: holding(norm=Norm()), None),
        (lambda: holding(layers=listed(Block()), norm=Norm()), "norm"),
        (lambda: holding(layers=listed(Norm()), norm=Norm()), None),
    ],
)
def test_the_norm_after_the_last_blocks(model, name):
    made = model()
    expected = [] if name is None else [name]
    assert list(find_norm(made, find_regions(made))) == expected


# -- regions inside of regions -----------------------------------------------------------------------------------------


def test_a_region_inside_another_is_refused():
    model = Unet()
    named = dict(model.named_modules())
    with pytest.raises(PlanError, match=r"region 'levels\.1\.0\.up' is inside of region 'levels\.1\.0'"):
        refuse_nested({name: named[name] for name in ("levels.0.0", "levels.1.0.up", "levels.1.0")})
    refuse_nested({name: named[name] for name in ("levels.0.0", "levels.1.0.up", "levels.1.0.down", "levels.1.1")})
    refuse_nested(find_regions(model))


def test_a_region_inside_another_by_a_second_name_is_refused():
    shared, holder = Block(), nn.Sequential(Block())
    holder.also = shared
    with pytest.raises(PlanError, match="region 'b' is inside of region 'a'"):
        refuse_nested({"a": holder, "b": shared})


class Calls(nn.Module):
    """Calls itself, or a block that is no child."""

    def __init__(self, inner=None):
        super().__init__()
        self.block = Block()
        self.inner = [inner or self]

    def forward(self, x, depth=1):
        x = self.block(x)
        return x if depth == 0 else self.inner[0](x, 0)


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
def test_regions_found_to_nest_are_not_planned(settings):
    last = Calls()
    model = nn.Sequential(Calls(last), last)
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    with pytest.warns(ebbtide.EbbtideWarning, match="no plan was made"):
        for k in range(12):
            model(batch(k)).sum().backward()
    assert handle.profile is None
    handle.remove()
    with pytest.raises(PlanError, match="changing or nested regions"):
        measure(model, batch(0), **SETTINGS)
