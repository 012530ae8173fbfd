"""Linear layers in C++ against float64, for every kind of processor that can be compiled for."""

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from rootlace.kernels.native.library import Team
from rootlace.kernels.native.linear import Arena, Epilogue, Packer, Products
from rootlace.kernels.weights import Dense, Quantised, Weight, parts_of
from tests.kernels.native.layouts import PackedLinear
from tests.kernels.quantised_cases import integers_are_multiplied
from tests.native import TARGETS, library_for, with_tile_unit

PLAIN = (Epilogue.STORE, Epilogue.FLOAT32, Epilogue.ADD)
ACTIVATIONS = {
    Epilogue.SILU_MUL: silu,
    Epilogue.GELU_MUL: lambda x: gelu(x, approximate="tanh"),
    Epilogue.RELU: relu,
    Epilogue.GELU: gelu,
    Epilogue.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
}
DTYPES = (torch.float32, torch.bfloat16)
THREADS = (1, 2, 3, 64)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 64, 97, 130, 200)
# Outputs: panels are 48 wide; inputs: odd, short, more than one stretch.
SHAPES = ((1, 1), (5, 3), (16, 7), (47, 64), (48, 8), (49, 33), (130, 65), (300, 128), (33, 4100))


class Machine:
    """The kernels for one kind of processor, with teams of several sizes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.teams = {threads: Team(library, threads) for threads in THREADS}

    def packed(
        self, weight: Tensor, bias: Tensor | None = None, gated: bool = False, threads: int = 2
    ) -> PackedLinear:
        return self.packed_weight(Dense(weight, bias), weight.dtype, gated, threads)

    def packed_weight(
        self, weight: Weight, dtype: torch.dtype, gated: bool = False, threads: int = 2
    ) -> PackedLinear:
        team = self.teams[threads]
        return PackedLinear(self.library, team, weight, dtype, gated=gated)

    def multiplies_integers(self, weight: Weight, dtype: torch.dtype) -> bool:
        instructions = self.library.rl_instructions().decode()
        return all(
            isinstance(part, Quantised) and integers_are_multiplied(instructions, part, dtype)
            for part in parts_of(weight)
        )


@pytest.fixture(scope="module", params=TARGETS)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(library_for(request.param))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned(packed: PackedLinear, epilogue: Epilogue, rows: int) -> Tensor:
    """An output of NaN, or a residual: what must be overwritten, or added to."""
    columns = packed.outputs // 2 if packed.gated else packed.outputs
    if epilogue == Epilogue.ADD:
        return random(rows, columns, seed=3)
    dtype = torch.float32 if epilogue.wide else packed.dtype
    return torch.full((rows, columns), torch.nan, dtype=dtype)


def multiplied(packed: PackedLinear, epilogue: Epilogue, x: Tensor) -> Tensor:
    out = poisoned(packed, epilogue, x.shape[0])
    packed.multiply(epilogue, x, out)
    return out


def reference(
    weight: Tensor, bias: Tensor | None, epilogue: Epilogue, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the expected result in float64, and the size of the sums' terms."""
    y = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        y += bias.double()
        size += bias.double().abs()
    # Of all activations f: |f'| <= 1.2, |f(x)| <= |x|.
    if epilogue.gated:
        gate, up = y.chunk(2, -1)
        gate_size, up_size = size.chunk(2, -1)
        found = ACTIVATIONS[epilogue](gate) * up
        return found, 1.2 * gate_size * up.abs() + gate.abs() * up_size
    if epilogue in ACTIVATIONS:
        return ACTIVATIONS[epilogue](y), 1.2 * size
    if epilogue == Epilogue.ADD:
        residual = random(*y.shape, seed=3).double()
        return residual + y, size + residual.abs()
    return y, size


def assert_near(out: Tensor, weight: Tensor, want: Tensor, size: Tensor) -> None:
    """Within the rounding of float32 sums, and of one rounding to the output's dtype."""
    terms = weight.shape[1] ** 0.5 + 8
    bound = size * terms * 2**-23 + want.abs() * torch.finfo(out.dtype).eps + 1e-30
    if weight.dtype == torch.bfloat16:
        bound += 1e-30  # products below float32's normal range count as zero
    wrong = ~((out.double() - want).abs() <= bound)
    assert not wrong.any(), (wrong.sum(), (out.double() - want).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_products_are_those_of_float64(
    machine: Machine, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, seed=2)
    with_bias, without = machine.packed(weight, bias), machine.packed(weight)
    for rows in ROWS if inputs < 4000 else (1, 9, 70):
        x = random(rows, inputs, dtype=dtype, seed=rows)
        for epilogue in PLAIN:
            out = multiplied(with_bias, epilogue, x)
            assert_near(out, weight, *reference(weight, bias, epilogue, x))
        out = multiplied(without, Epilogue.STORE, x)
        assert_near(out, weight, *reference(weight, None, Epilogue.STORE, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner, inputs", [(1, 1), (20, 9), (48, 16), (100, 65), (160, 130)])
def test_activated_products_are_those_of_float64(
    machine: Machine, inner: int, inputs: int, dtype: torch.dtype
) -> None:
    for epilogue in ACTIVATIONS:
        outputs = 2 * inner if epilogue.gated else inner
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        for bias in (None, random(outputs, seed=2)):
            packed = machine.packed(weight, bias, gated=epilogue.gated)
            for rows in (1, 2, 8, 9, 17, 97) if epilogue == Epilogue.SILU_MUL else (1, 9):
                x = random(rows, inputs, dtype=dtype, seed=rows)
                out = multiplied(packed, epilogue, x)
                assert_near(out, weight, *reference(weight, bias, epilogue, x))


@pytest.mark.parametrize("epilogue", [Epilogue.FLOAT32, Epilogue.ADD])
def test_products_times_a_factor(machine: Machine, epilogue: Epilogue) -> None:
    weight, bias, x = random(50, 33, seed=1), random(50, seed=2), random(9, 33, seed=3)
    packed = PackedLinear(
        machine.library, machine.teams[2], Dense(weight, bias), weight.dtype, factor=-0.3
    )
    out = multiplied(packed, epilogue, x)
    assert_near(out, weight, *reference(-0.3 * weight, -0.3 * bias, epilogue, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, epilogue",
    [  # each epilogue on one stretch of inputs and on several
        (50, 33, Epilogue.STORE),
        (50, 33, Epilogue.ADD),
        (336, 96, Epilogue.FLOAT32),
        (336, 96, Epilogue.SILU_MUL),
        (50, 701, Epilogue.SILU_MUL),
        (336, 96, Epilogue.GELU_MUL),
        (50, 33, Epilogue.GELU),
        (50, 701, Epilogue.FLOAT32),
        (64, 4100, Epilogue.ADD),
        (64, 4100, Epilogue.STORE),
    ],
)
def test_rows_have_the_same_bits_in_any_company_and_on_any_number_of_threads(
    machine: Machine, outputs: int, inputs: int, epilogue: Epilogue, dtype: torch.dtype
) -> None:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, seed=2)
    teams = {t: machine.packed(weight, bias, epilogue.gated, threads=t) for t in machine.teams}
    x = random(203, inputs, dtype=dtype, seed=5)
    all_rows = multiplied(teams[2], epilogue, x)
    residual = poisoned(teams[2], epilogue, 203)
    for threads, packed in teams.items():
        begin = 0
        for count in (203,) if inputs > 4000 else (1, 2, 7, 8, 13, 30, 65, 77):
            out = residual[begin : begin + count].clone()
            packed.multiply(epilogue, x[begin : begin + count], out)
            assert torch.equal(out, all_rows[begin : begin + count]), (threads, begin, count)
            begin += count
        assert begin == 203


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_infinities_and_nans_leave_the_others_alone(
    machine: Machine, dtype: torch.dtype
) -> None:
    """With an odd number of inputs, the memory behind a row's last input is another row's."""
    weight = random(37, 5, dtype=dtype, seed=1)
    packed = machine.packed(weight)
    x = random(11, 5, dtype=dtype, seed=2)
    want = multiplied(packed, Epilogue.FLOAT32, x)
    bad = x.clone()
    bad[1::2] = torch.tensor([torch.inf, torch.nan, 1, 2, torch.nan], dtype=dtype)
    out = multiplied(packed, Epilogue.FLOAT32, bad)
    assert torch.equal(out[::2], want[::2])
    assert out[1::2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero_neither_overflow_nor_lose_their_sign(
    machine: Machine, dtype: torch.dtype
) -> None:
    gate = torch.tensor([-200.0, -100, -88, -20, -1e-6, 0, 1e-6, 20, 88, 100, 200, torch.nan])
    for epilogue, activation in ACTIVATIONS.items():
        weight = torch.cat([gate, torch.ones_like(gate)])[:, None].to(dtype)
        weight = weight if epilogue.gated else weight[: len(gate)]
        packed = machine.packed(weight, gated=epilogue.gated)
        out = multiplied(packed, epilogue, torch.ones(3, 1).to(dtype)).double()
        want = activation(weight[: len(gate), 0].double()).expand(3, -1)
        atol = 1e-6 if epilogue == Epilogue.GELU else 1e-30
        torch.testing.assert_close(out, want, rtol=2**-8, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_are_no_work(machine: Machine, dtype: torch.dtype) -> None:
    packed = machine.packed(random(20, 8, dtype=dtype))
    packed.multiply(Epilogue.STORE, torch.empty(0, 8, dtype=dtype), torch.empty(0, 20, dtype=dtype))


def test_what_is_beside_the_output_stays(machine: Machine) -> None:
    packed = machine.packed(random(50, 9, dtype=torch.bfloat16))
    around = torch.full((12, 50), 7.0, dtype=torch.bfloat16)
    packed.multiply(Epilogue.STORE, random(9, 9, dtype=torch.bfloat16), around[2:11])
    assert (around[:2] == 7).all() and (around[11:] == 7).all()


def test_weights_lie_behind_one_another_in_an_arena(machine: Machine) -> None:
    arena = Arena()
    library, team = machine.library, machine.teams[2]
    weights = [random(50, 9, seed=seed) for seed in range(4)]
    packed = [
        PackedLinear(library, team, Dense(weight), torch.float32, arena=arena) for weight in weights
    ]
    begins = [one.packed.ctypes.data for one in packed]
    assert all(begin % 64 == 0 for begin in begins) and begins == sorted(begins)
    assert begins[3] - begins[0] == 3 * len(packed[0].packed)
    x = random(4, 9, seed=4)
    for one, weight in zip(packed, weights, strict=True):
        out = multiplied(one, Epilogue.STORE, x)
        assert torch.equal(out, multiplied(machine.packed(weight), Epilogue.STORE, x))


def test_an_arena_gives_zeros_of_any_size() -> None:
    arena = Arena()
    for size in (1, 100, Arena.CHUNK + 5, 64, Arena.CHUNK - 64):
        taken = arena.take(size)
        assert len(taken) == size and taken.ctypes.data % 64 == 0
        assert taken[0] == 0 and taken[-1] == 0
        taken.fill(255)


def test_products_in_one_call_are_those_of_calls_of_their_own(machine: Machine) -> None:
    weights = [Dense(random(100, 40, seed=seed)) for seed in range(5)]
    x = random(3, 40, seed=9)
    together, alone = torch.zeros(3, 100), torch.zeros(3, 100)
    packer = Packer(machine.library, machine.teams[2], torch.float32)
    Products(packer, weights).multiply(Epilogue.ADD, x, together)
    for weight in weights:
        machine.packed_weight(weight, torch.float32).multiply(Epilogue.ADD, x, alone)
    assert torch.equal(together, alone)


def test_bad_arguments_are_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not in torch\.float64"):
        machine.packed(random(3, 4).double())
    with pytest.raises(ValueError, match=r"a matrix in torch\.float32, not "):
        machine.packed_weight(Dense(random(3, 4).double()), torch.float32)
    with pytest.raises(ValueError, match=r"a matrix in torch\.float32, not "):
        machine.packed(random(3, 4)[None])
    with pytest.raises(ValueError, match=r"weights of shape \[0, 4\]"):
        machine.packed(random(0, 4))
    with pytest.raises(ValueError, match="3 rows are not a gate"):
        machine.packed(random(3, 4), gated=True)
    with pytest.raises(ValueError, match="a bias of shape"):
        machine.packed(random(3, 4), random(4))
    packed = machine.packed(random(4, 4))
    with pytest.raises(ValueError, match="gated epilogues and for nothing else"):
        packed.multiply(Epilogue.SILU_MUL, random(2, 4), random(2, 2))
    with pytest.raises(ValueError, match="x is contiguous"):
        packed.multiply(Epilogue.STORE, random(4, 2).T, random(2, 4))
    with pytest.raises(ValueError, match="out is contiguous"):
        packed.multiply(Epilogue.STORE, random(2, 4), random(2, 4).bfloat16())


def test_the_tile_unit_computes_what_its_twin_does() -> None:
    """Results are equal bit by bit, also with products and sums below float32's normal range."""
    unit, twin = (Machine(one) for one in with_tile_unit())
    generator = torch.Generator().manual_seed(0)

    def wide(*shape: int, least: int) -> Tensor:
        exponents = torch.randint(least, 6, shape, generator=generator)
        return torch.ldexp(torch.randn(*shape, generator=generator), exponents).bfloat16()

    for outputs, inputs, least in ((50, 33, -4), (130, 65, -70), (33, 600, -62), (40, 320, -130)):
        weight = wide(outputs, inputs, least=least)
        for rows in (1, 9, 33, 130):
            x = wide(rows, inputs, least=least)
            found, expected = (
                multiplied(machine.packed(weight), Epilogue.FLOAT32, x) for machine in (unit, twin)
            )
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
