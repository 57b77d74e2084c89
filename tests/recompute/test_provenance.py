"""Operators that second runs leave out: which, that nobody misses them, and what happens if somebody does."""

import contextlib
import copy
import ctypes

import pytest
import torch
from support import OperatorNames, assert_equal
from test_offload import offload
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import ConfigError, Plan, PlanError, Recipe, RegionPlan
from ebbtide._recompute.provenance import Absent, AbsentReadError, Made, Provenance, Reads
from ebbtide._recompute.prune import Course, PruneCache

ALL = tuple(range(20))
ROTATED = Recipe("selective", sites=(0, 1, 3), beyond=(0, 1))  # q and k as attention saves them, and its outputs
EVERYTHING = Recipe("selective", sites=ALL, beyond=ALL)
BATCH, TOKENS, HEADS, WIDTH = 2, 16, 4, 32


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def rotated(t, table):
    half = t.shape[-1] // 2
    left, right = t[..., :half], t[..., half:]
    return t * table + torch.cat((-right, left), dim=-1) * table


class Attention(nn.Module):
    """Between a projection and attention stands `between`, of one of q and k."""

    def __init__(self, between=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.between = between

    def forward(self, x, table):
        normed = self.norm(x)
        q, k, v = (
            product(normed).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for product in (self.q, self.k, self.v)
        )
        q, k = rotated(q, table), rotated(k, table)
        if self.between is not None:
            q = self.between(q)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)).tanh()


class Layers(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        table = torch.arange(TOKENS * WIDTH // HEADS).view(TOKENS, -1).float().cos()
        for layer in self.layers:
            x = layer(x, table)
        return x.square().mean()


def steps(model, retains=False):
    """Losses, gradients and what runs in backward, of three steps."""
    results, names = [], []
    for number in range(3):
        torch.manual_seed(number)
        model.zero_grad()
        loss = model(torch.randn(BATCH, TOKENS, WIDTH))
        with OperatorNames() as counting:
            if retains:
                loss.backward(retain_graph=True)
            loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        names.append(counting.names)
    return results, names


def compare(make, recipe, **settings):
    """What runs in backward, step by step; the numbers are those of the twin."""
    torch.manual_seed(0)
    model = Layers(make)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=recipe)
    found, names = steps(model, **settings)
    assert_equal(found, steps(twin, **settings)[0])
    stats = handle.stats()
    assert stats.host_bytes == 0
    assert stats.recomputed.count > 0
    return names


def calls(names, op):
    return [run.count(f"aten::{op}") for run in names]


# -- what is left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["keep", "offload"])
def test_what_lies_between_a_projection_and_attention_does_not_run_again(outputs):
    projections = Recipe("selective", sites=(0, 1, 3), outputs=outputs)
    before = compare(Attention, projections)
    now = compare(Attention, Recipe("selective", sites=(0, 1, 3), beyond=(0, 1), outputs=outputs))
    assert calls(before, "cat") == [4, 4, 4]  # of q and k, in both layers
    assert calls(now, "cat") == [0, 0, 0]
    assert calls(now, "mm") == calls(before, "mm")


def test_as_many_bytes_are_held():
    moved = []
    for recipe in (Recipe("selective", sites=(0, 1, 3)), ROTATED):
        model = Layers(Attention)
        handle = offload(model, recipe=recipe)
        steps(model)
        moved.append(handle.stats().parcels.nbytes)
    assert moved[0] == moved[1]


@pytest.mark.parametrize("recipe", [ROTATED, EVERYTHING], ids=str)
def test_graphs_may_be_kept(recipe):
    assert calls(compare(Attention, recipe, retains=True), "cat") == [0, 0, 0]


def test_all_that_is_dear_may_be_left_out():
    """Then all is held that the region saves behind its first product."""
    assert calls(compare(Attention, EVERYTHING), "_scaled_dot_product_flash_attention_for_cpu") == [0, 0, 0]


def test_a_call_that_is_not_held_is_led_to_like_others():
    """Attention runs again in neither case: what it saves is held."""
    names = compare(Attention, Recipe("selective", sites=(0, 1, 2), beyond=(0, 1)))
    assert calls(names, "_scaled_dot_product_flash_attention_for_cpu") == [0, 0, 0]


# -- what cannot be ----------------------------------------------------------------------------------------------------


class Numpy(torch.autograd.Function):
    """A kernel that no mode sees."""

    @staticmethod
    def forward(ctx, t):
        out = torch.empty_like(t)
        out.copy_(torch.from_numpy(t.detach().numpy() * 2))
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Address(torch.autograd.Function):
    """One that takes an address, writes to memory that no operator connects with it, and hides what goes wrong."""

    @staticmethod
    def forward(ctx, t):
        out = torch.zeros(t.shape)
        with contextlib.suppress(Exception):
            dense = t.contiguous()
            ctypes.memmove(out.data_ptr(), dense.data_ptr(), out.untyped_storage().nbytes())
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(q):
    return (q * 1.5).add_(1.0)


def as_a_number(q):
    return q * (1.0 if q.sum().item() > 0 else 2.0)


def drawn(q):
    return functional.dropout(q, 0.5)


def chosen(q):
    return q if bool((q > 1e9).any()) else q * 2


NEEDED = {
    "changed in place": in_place,
    "a number": as_a_number,
    "drawn from": drawn,
    "decided by": chosen,
    "a kernel": Numpy.apply,
    "an address": Address.apply,
}


@pytest.mark.parametrize("name", NEEDED)
def test_what_somebody_needs_runs_again(name):
    names = compare(lambda: Attention(NEEDED[name]), ROTATED)
    # q's, in both layers; and k's too where only the second run finds out: it does not know whose it was.
    assert calls(names[-1:], "cat") == [4 if name == "an address" else 2]


def test_an_operator_that_comes_in_the_second_run_only_is_not_left_out():
    runs = []

    class Moody(Attention):
        def forward(self, x, table):
            runs.append(self)
            if runs.count(self) % 2 == 0:
                torch.randn_like(self.norm(x)).mul(self.q(self.norm(x)))
            return super().forward(x, table)

    model = Layers(Moody)
    offload(model, recipe=ROTATED)
    with pytest.raises(ebbtide.RecomputeError, match="when it ran again"):
        steps(model)


def test_region_code_that_goes_wrong_raises_what_it_raises():
    runs = []

    def breaks_again(q):
        runs.append(q)
        if len(runs) > 2:
            raise ValueError("broken")
        return q

    model = Layers(lambda: Attention(breaks_again))
    offload(model, recipe=ROTATED)
    loss = model(torch.randn(BATCH, TOKENS, WIDTH))
    with pytest.raises(ValueError, match="broken"):
        loss.backward()


# -- forwards that go the same way, and others -------------------------------------------------------------------------


class Turning:
    """What stands between goes by turns. In the second run of a step it is that of the step."""

    turn = 0

    def __init__(self, *ways):
        self.ways = ways

    def __call__(self, q):
        return self.ways[Turning.turn % len(self.ways)](q)


def turns(make):
    """How many rotations run again in the backward of each step, all of whose bits are those of the twin."""
    torch.manual_seed(0)
    model = Layers(make)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=ROTATED)
    rotations = []
    for Turning.turn in range(6):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        with OperatorNames() as counting:
            model(x).backward()
        rotations.append(counting.names.count("aten::cat") - 4)
        twin(x).backward()
        assert_equal(*([p.grad for p in each.parameters()] for each in (model, twin)))
    assert handle.stats().host_bytes == 0
    return rotations


def plus(q):
    return (q + 1.0).neg()


def minus(q):
    return (q - 1.0).neg()


def other_number(q):
    return (q + 2.0).neg()


def in_place_behind(q):
    return (q + 1.0).mul_(2.0).neg()


def exponential(q):
    return (q + 1.0).exp().neg()


def hyperbolic(q):
    """It saves as many."""
    return (q + 1.0).tanh().neg()


def said(count):
    return torch.full((WIDTH // HEADS,), float(count))


def part(count):
    """How many tokens that is of q only says how it looks, and a save depends on it."""

    def between(q):
        return q * said((q[:, :, :count] + 1.0).shape[2])

    return between


def flat(q):
    return q * said(len(torch.ops.aten.mean(q.detach(), [2]).shape))


def turned(q):
    """Another operator with the same arguments, and the like of all saves."""
    return q * said(len(torch.ops.aten.flip(q.detach(), [2]).shape))


def kept_of(share):
    """How many there are is up to what is drawn."""

    def between(q):
        return q * q[q > share].shape[0]

    return between


def test_what_is_led_to_is_found_once(monkeypatch):
    followed = []
    follow = Provenance.follow
    monkeypatch.setattr(Provenance, "follow", lambda self, *call: followed.append(self) or follow(self, *call))
    counts = []

    class Counted(Attention):
        def forward(self, x, table):
            counts.append(len(followed))
            return super().forward(x, table)

    assert turns(Counted) == [0] * 6
    assert len(followed) > 0
    assert counts[4] == len(followed)  # from the second step on, nothing is


@pytest.mark.parametrize("other", [minus, other_number, in_place_behind, exponential])
def test_forwards_that_go_another_way(other):
    assert turns(lambda: Attention(Turning(plus, other)))[0] == 0


@pytest.mark.parametrize("ways", [(part(3), part(5)), (flat, turned)], ids=["argument", "operator"])
def test_looks_of_what_is_left_out_are_those_of_this_forward(ways):
    assert turns(lambda: Attention(Turning(*ways)))[0] == 0


def test_a_size_that_hangs_on_bytes():
    assert turns(lambda: Attention(Turning(kept_of(0.0), kept_of(0.5))))[-1] == 2  # q's run again


class Looking(nn.Linear):
    """In the fourth step it looks at the product of some tokens first, of which nothing is saved."""

    def forward(self, x):
        if Turning.turn == 3:
            with torch.no_grad():
                super().forward(x[:, :4])
        return super().forward(x)


def looking():
    attention = Attention()
    attention.k = Looking(WIDTH, WIDTH, bias=False)
    return attention


@pytest.mark.parametrize(("usual", "other"), [(plus, exponential), (exponential, hyperbolic)])
def test_a_way_that_saves_otherwise_is_found_before_anything_fails(usual, other):
    """One way in the fourth step, the other before and after: only there all runs again, and nothing is given up."""
    ways = [usual, usual, usual, other, usual, usual]
    assert turns(lambda: Attention(Turning(*ways))) == [0, 0, 0, 4, 0, 0]


def test_a_way_that_leaves_out_other_calls_is_found_before_anything_fails():
    assert turns(looking) == [0, 0, 0, 4, 0, 0]


def test_courses_are_kept_for_the_latest_few():
    courses = PruneCache()
    for number in range(100):
        courses.add("recipe", Course((number,), [], frozenset(), []))
    assert courses.of("recipe", 99) is not None
    assert courses.of("other", 99) is None
    assert [number for number in range(100) if courses.of("recipe", number) is not None] == list(range(84, 100))


# -- planned -----------------------------------------------------------------------------------------------------------


def profile_of(make):
    model = Layers(make)
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    for _ in range(2):
        steps(model)
    assert handle.profile is not None
    return handle.profile


def test_a_profile_knows_what_projections_lead_to():
    q, k, v, attention, _ = profile_of(Attention).regions[0].dear
    assert (q.users, k.users, v.users, attention.users) == ((3,), (3,), (3,), ())
    assert len(q.led) == len(k.led) == len(v.led) == 1  # what attention saves
    assert q.led_ops == k.led_ops > v.led_ops > 0
    assert q.led_s > 0 < k.led_s
    assert attention.led == ()  # it returns several


@pytest.mark.parametrize("name", ["changed in place", "a number", "drawn from", "decided by", "a kernel"])
def test_a_profile_knows_what_somebody_needs(name):
    q, k, *_ = profile_of(lambda: Attention(NEEDED[name])).regions[0].dear
    assert (q.led, q.led_s, q.led_ops, q.users) == ((), 0.0, 0, ())
    assert len(k.led) == 1


class Unseen(torch.autograd.Function):
    """A kernel of two tensors that saves both, as attention of another library does."""

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        out = torch.zeros(q.shape)
        dense = q.contiguous()
        ctypes.memmove(out.data_ptr(), dense.data_ptr(), out.untyped_storage().nbytes())
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        return grad * k, grad * q


class SavedUnseen(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        return Unseen.apply(self.q(x) * 0.5, self.k(x) * 0.5)


def test_saves_of_a_kernel_that_no_mode_sees_are_not_led_to():
    for region in profile_of(SavedUnseen).regions:
        assert [dear.led for dear in region.dear] == [(), ()]


# -- the parts ---------------------------------------------------------------------------------------------------------


def absent_like(t):
    made = Made(None, (), ((t.size(), t.stride(), t.storage_offset(), t.dtype, t.device),), None)
    return made.absent(Reads())


def test_an_absent_looks_like_the_tensor():
    t = torch.randn(4, 6, dtype=torch.float64)[:, 1:].t()
    absent = absent_like(t)
    assert type(absent) is Absent
    assert (absent.shape, absent.stride(), absent.storage_offset()) == (t.shape, t.stride(), t.storage_offset())
    assert (absent.dtype, absent.device, absent.requires_grad) == (t.dtype, t.device, False)


@pytest.mark.parametrize("read", [torch.Tensor.sum, torch.Tensor.detach, torch.Tensor.data_ptr, torch.Tensor.item])
def test_an_absent_notes_who_reads_it(read):
    absent = absent_like(torch.randn(1))
    with pytest.raises((AbsentReadError, RuntimeError)):
        read(absent)


def test_an_absent_gives_no_address_to_native_code():
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C._to_dlpack(absent_like(torch.randn(3)))


def test_lineage_goes_by_memory_and_ends_with_it():
    lineage, op = Provenance(), torch.ops.aten.mul.Tensor
    a, b = torch.randn(4), torch.randn(4)
    lineage.begin(0, op, (), {}, a)
    lineage.begin(3, op, (), {}, b)
    assert lineage.of(a.view(2, 2)) == 1
    c = a * b
    assert lineage.follow(op, (a, b), {}, c) == lineage.of(c) == 0b1001
    assert lineage.follow(op, (torch.ones(1),), {}, torch.ones(1)) == 0
    assert lineage.spoiled == 0
    lineage.follow(torch.ops.aten.add_.Tensor, (b, b), {}, b)
    assert lineage.spoiled == 0b1000


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"action": "selective", "beyond": (0,)},
        {"action": "selective", "sites": (0, 1), "beyond": (2,)},
        {"action": "offload", "sites": (0, 1), "beyond": (0,)},
    ],
)
def test_what_is_left_out_is_some_of_the_sites(given):
    with pytest.raises(ConfigError, match="beyond="):
        Recipe(**given)


def test_a_plan_with_such_a_recipe_is_saved_and_loaded(tmp_path):
    plan = Plan({"layers.0": RegionPlan(ROTATED)})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "beyond 0,1" in str(plan)
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace('"beyond": [', '"beyond": ["x",'))
    with pytest.raises(PlanError, match="beyond"):
        Plan.load(tmp_path / "plan.json")
