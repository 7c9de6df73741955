"""The kernel, interpreted, against the reference scan: values and gradients; and its form for a GPU."""

import functools
import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import fused
from cssm.cells import gated, gdn, hgru, hgru_bi
from cssm.cells.core import gated_states
from cssm.flops import count_flops
from cssm.fused import fused_scan
from cssm.jaxprs import inner, trace
from cssm.scan import every_state, linear_scan
from cssm.spectral import Packed, Spectrum

B, F = 4, 3


def numbers(*shape, seed=0):
    return 0.4 * np.random.default_rng([seed, *shape]).standard_normal(shape)


def spectra(*shape, count=1):
    return tuple(Spectrum(numbers(*shape, seed=2 * i), numbers(*shape, seed=2 * i + 1)) for i in range(count))


def gates(names, *shape):
    return {name: 0.5 + numbers(*shape, seed=i) for i, name in enumerate(names)}


def packed(*shape, count=1):
    planes = zip(*spectra(*shape, count=count), strict=True)
    return np.stack([np.concatenate(same, -1) for same in planes], -3)


NAMES = hgru_bi.DECAYS + hgru_bi.COUPLINGS + hgru_bi.READS


def problem(steps, channels, shown=None, batch=B, frequencies=F, cell=hgru):
    """hgru's recurrence, or hgru_bi's, which compiles twice as long: (make_step, constants, counts, gates, inputs)."""
    count, names = (3, NAMES) if cell is hgru_bi else (2, hgru.GATES)
    inputs = packed(batch, shown or steps, frequencies, channels, count=count)
    shared = gates(names, batch, steps, frequencies, 1)
    return cell._step, spectra(frequencies, channels, count=2), (count, count), shared, inputs


def both(
    make_step,
    constants,
    counts,
    gates,
    inputs,
    last_only=False,
    stable=False,
    read=every_state,
    read_gates=(),
    offset=None,
    copies=1,
):
    """((what is read, gradients) of the reference, of the kernel)."""

    @functools.partial(jax.jit, static_argnames="method")
    def run(arrays, method):
        def loss(arrays):
            constants, gates, inputs, read_gates, offset = arrays
            out = linear_scan(
                make_step, constants, counts, gates, inputs, method, last_only, stable, read, read_gates, offset, copies
            )
            # Weights of their own for every number: a mistaken place would change the sum.
            return jnp.sum(out * numbers(*out.shape)), out

        grads, out = jax.grad(loss, has_aux=True)(arrays)
        return out, grads

    return (run((constants, gates, inputs, read_gates, offset), method=method) for method in ("reference", "fused"))


def same(*args, **kwargs):
    """Returns (what is read, gradients) of the reference."""
    with jax.enable_x64(True):
        want, got = both(*args, **kwargs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-12), want, got)
        assert jax.tree.structure(want) == jax.tree.structure(got)
    return want


@pytest.mark.parametrize(
    "steps,channels,shown,last_only,cell",
    [
        (1, 4, 1, False, hgru),
        (2, 4, 2, True, hgru),
        (5, 4, 5, False, hgru),
        (4, 5, 1, True, hgru_bi),  # channels beyond the last one are masked; a still image
        (5, 4, 3, False, hgru),  # the third input stays
    ],
)
def test_values_and_gradients_are_those_of_the_reference(steps, channels, shown, last_only, cell):
    args = problem(steps, channels, shown, cell=cell)
    offset = numbers(args[2][1] * channels)  # added at frequency 0
    same(*args, last_only=last_only, offset=offset)


def test_channels_beyond_one_block_and_a_batch_in_parts(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", 4)
    monkeypatch.setattr(fused, "PROGRAMS", 2 * F * 2)  # two parts of two examples
    same(*problem(3, 6))


def test_stable_transition_is_taken_within_the_kernel():
    args = problem(2, 4)
    stable, _ = same(*args, stable=True)
    with jax.enable_x64(True):
        plain, _ = next(both(*args))
        assert np.abs(stable - plain).max() > 0.01


def written_over(function, *args):
    """The shapes of what kernels write over one of their operands."""

    def of(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield from (equation.outvars[out].aval.shape for _, out in equation.params["input_output_aliases"])
            else:
                for part in inner(equation):
                    yield from of(part)

    return list(of(trace(function, *args)))


@pytest.mark.parametrize("shown,last_only", [(4, False), (4, True), (1, False)])
def test_the_gradient_is_written_over_the_given_one_where_it_is_as_large(shown, last_only):
    make_step, constants, counts, gates, inputs = problem(4, 8, shown)
    scan = lambda inputs: fused_scan(make_step, constants, counts, gates, inputs, last_only, every_state, ())
    over = written_over(jax.grad(lambda inputs: jnp.sum(scan(inputs))), inputs)
    assert [np.prod(shape) for shape in over] == ([] if last_only or shown < 4 else [inputs.size])


@pytest.mark.parametrize("d,heads,last_only", [(2, 3, True), (3, 2, False)])
def test_copies_share_their_keys(d, heads, last_only):
    """As gdn runs: the rows of a matrix move alike, and keys, gates and queries are theirs in common."""
    make_step = functools.partial(gdn._step, stable=False)
    shared = gates(("alpha", "beta"), B, 3, F, 1) | {"k": Packed(packed(B, 3, F, heads, count=d), d)}
    asked = Packed(numbers(B, 3, 2, F, d * heads), d)
    args = (make_step, spectra(F, heads), (d, 1), shared, packed(B, 3, F, heads, count=d))
    same(*args, last_only=last_only, read=gdn._asked, read_gates=asked, copies=d)


@pytest.mark.parametrize("frequencies,channels", [(1, 1), (F, 4), (5, 33)])
def test_several_frequencies_in_a_program(frequencies, channels):
    """Where channels are few: the last program may have frequencies too many, and gates may be alike at all of them."""
    make_step, constants, counts, several, inputs = problem(3, channels, frequencies=frequencies)
    several["decay_x"] = several["decay_x"][:, :, :1]
    several["decay_y"] = 0.3 + numbers(1, 3, 1, channels)
    several["mu_inhib"] = 0.3 + numbers(B, 3, frequencies, channels)
    several["mu_excit"] = several["mu_excit"][:1, :, :1]
    several["B"] = np.broadcast_to(several["B"][:1], (1, *several["B"].shape[1:]))
    same(make_step, constants, counts, several, inputs, offset=numbers(2 * channels))


def test_bf16_is_rounded_on_the_way_in_and_out_alone():
    make_step, constants, counts, gates, inputs = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.bfloat16) if isinstance(leaf, np.ndarray) else leaf, problem(4, 4)
    )
    inside = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (constants, gates, inputs))
    want = linear_scan(make_step, inside[0], counts, *inside[1:], "reference")
    got = linear_scan(make_step, constants, counts, gates, inputs, "fused")
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_states_are_kept_in_the_dtype_of_the_results():
    make_step, constants, counts, gates, inputs = problem(4, 4)
    inputs = jnp.asarray(inputs, jnp.bfloat16)
    scan = lambda inputs: fused_scan(make_step, constants, counts, gates, inputs, False, every_state, ())
    jaxpr = jax.make_jaxpr(lambda inputs: jax.vjp(scan, inputs)[0])(inputs)
    (forward,) = (e for e in jaxpr.eqns if e.primitive.name == "pallas_call")
    assert [out.aval.shape[1] for out in forward.outvars] == [4, 3]  # all steps, and all but the last
    assert {out.aval.dtype for out in forward.outvars} == {jnp.dtype(jnp.bfloat16)}


def on_a_gpu():
    """Lower for a GPU that need not be there; jax from 0.11 on wants to know which."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    from jax._src.mesh import AbstractDevice
    from jax.sharding import AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def shapes_of(arrays, dtype):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), arrays)


@pytest.mark.parametrize(
    "make_step,constants,count,names",
    [
        (hgru_bi._step, 2, 3, NAMES),
        (gated._step, 1, 1, ("decay", "write")),
    ],
)
@pytest.mark.parametrize("steps,channels,still", [(8, 384, False), (11, 100, True)])
def test_it_lowers_for_a_gpu(make_step, constants, count, names, steps, channels, still):
    """Forward and backward: Triton's rules for shapes hold."""
    frequencies = 30
    arrays = (
        shapes_of(spectra(frequencies, channels, count=constants), jnp.float32),
        shapes_of(gates(names, 2, steps, frequencies, 1), jnp.bfloat16),
        shapes_of(packed(2, 1 if still else steps, frequencies, channels, count=count), jnp.bfloat16),
        shapes_of(numbers(2, 1 if still else steps, frequencies, 1), jnp.bfloat16),
    )

    def loss(constants, gates, inputs, reading):
        read = gated_states(*range(count))
        return jnp.sum(
            fused_scan(make_step, constants, (count, count), gates, inputs, still, read, reading, interpret=False)
        )

    with on_a_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


def test_copies_lower_for_a_gpu():
    """As gdn's recipe runs: 16 heads with keys of 4, several frequencies in a program."""
    d, heads, frequencies, half = 4, 16, 30, jnp.bfloat16
    keys = lambda steps: Packed(jax.ShapeDtypeStruct((2, steps, 2, frequencies, d * heads), half), d)
    arrays = (
        shapes_of(spectra(frequencies, heads), jnp.float32),
        shapes_of(gates(("alpha", "beta"), 2, 8, frequencies, 1), half) | {"k": keys(8)},
        keys(8).array,
        keys(1),
    )

    def loss(constants, gates, inputs, asked):
        make_step, common = functools.partial(gdn._step, stable=False), (gates, inputs, True, gdn._asked, asked)
        return jnp.sum(fused_scan(make_step, constants, (d, 1), *common, copies=d, interpret=False))

    with on_a_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


def test_operations_are_counted_for_every_program():
    """A step of gated is 9 operations a number, of the kernel's too."""
    make_step, constants, inputs = gated._step, spectra(4, 4), packed(B, 8, 4, 4)
    arrays = constants, gates(("decay", "write"), B, 8, 4, 1), inputs
    scan = lambda *arrays: fused_scan(
        make_step, arrays[0], (1, 1), *arrays[1:], False, every_state, (), interpret=False
    )
    counted = count_flops(scan, *(shapes_of(part, jnp.float32) for part in arrays))
    assert 10 * B * 8 * 4 * 4 <= counted <= 14 * B * 8 * 4 * 4
