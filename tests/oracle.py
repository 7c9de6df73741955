"""Slow, obviously right float64 versions of the cells, in numpy, with the published parameter names and shapes.

They form the 3 x 3 matrices, transform with np.fft and loop over time; nothing is shared with the package.
"""

import numpy as np

HGRU_BI_GATES = ("decay_x decay_y decay_z mu_inhib mu_excit alpha_inhib alpha_excit gamma delta B D E C").split()


def wave_input(shape=(2, 4, 8, 10, 8)):
    """The input of the published fingerprints: 2 sin(0.9 i + 0.0013 i^2), rounded to float32."""
    i = np.arange(np.prod(shape), dtype=np.float64)
    return (2 * np.sin(0.9 * i + 0.0013 * i**2)).astype(np.float32).reshape(shape)


def wave_parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Leaf j in the order of its path: 0.5 sin(0.7 i + 0.011 i^2 + 1.3 j + 0.2)."""
    leaves = {}
    for j, path in enumerate(sorted(shapes)):
        i = np.arange(np.prod(shapes[path]), dtype=np.float64)
        leaves[path] = (0.5 * np.sin(0.7 * i + 0.011 * i**2 + 1.3 * j + 0.2)).reshape(shapes[path])
    return leaves


def dense_shapes(name, fan_in, fan_out):
    return {f"{name}/kernel": (fan_in, fan_out), f"{name}/bias": (fan_out,)}


def hgru_bi_shapes(channels, kernel, height, width, states=3):
    frequencies = height * (width // 2 + 1)
    shapes = {"k_exc": (channels, kernel, kernel), "k_inh": (channels, kernel, kernel)}
    shapes |= dense_shapes("input_proj", channels, 3 * channels)
    for gate in HGRU_BI_GATES:
        shapes |= dense_shapes(gate, channels, frequencies)
    shapes = {
        path if "/" not in path or "proj" in path else path.replace("/", "_gate/"): s for path, s in shapes.items()
    }
    if states > 1:
        shapes |= dense_shapes("output_proj", states * channels, channels)
    return shapes


def gated_shapes(channels, kernel, height, width, gate_type, spatial, temporal):
    columns = width // 2 + 1
    shapes = {"kernel": (channels, kernel, kernel)}
    shapes |= dense_shapes("in_proj", channels, 2 * channels) | dense_shapes("out_proj", channels, channels)
    if spatial:
        shapes |= {
            "short_conv_spatial/kernel": (spatial, spatial, 1, channels),
            "short_conv_spatial/bias": (channels,),
        }
    if temporal:
        shapes |= {
            "short_conv_temporal/kernel": (temporal, 1, channels),
            "short_conv_temporal/bias": (channels,),
        }
    for gate in ("delta_proj", "B_proj", "C_proj"):
        if gate_type == "dense":
            shapes |= dense_shapes(gate, channels, height * columns)
        else:
            shapes |= dense_shapes(f"{gate}_h", channels, height) | dense_shapes(f"{gate}_w", channels, columns)
    return shapes


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def dense(x, p, name):
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def kernel_spectrum(kernel, height, width, origin="image_center"):
    """Bounded spectrum [C, H, Wf] of kernels [C, k, k]."""
    channels, size, _ = kernel.shape
    full = np.zeros((channels, height, width))
    for a in range(size):
        for b in range(size):
            row, col = a + (height - size) // 2, b + (width - size) // 2
            if size > height:
                row = a - (size - height) // 2
            if size > width:
                col = b - (size - width) // 2
            if 0 <= row < height and 0 <= col < width:
                if origin == "origin":
                    row, col = (a - (size - 1) // 2) % height, (b - (size - 1) // 2) % width
                full[:, row, col] += kernel[:, a, b]
    raw = np.fft.rfft2(full)
    return 0.999 * raw / (1 + np.abs(raw))


def to_frequency(x):
    """[B, T, H, W, C] -> [B, T, C, H, Wf]."""
    return np.fft.rfft2(np.moveaxis(x, -1, 2))


def to_space(x_hat, width):
    return np.moveaxis(np.fft.irfft2(x_hat, s=(x_hat.shape[-2], width)), 2, -1)


def time_code(steps, channels):
    code = np.zeros((steps, channels))
    for t in range(steps):
        for i in range(channels // 2):
            w = 10000.0 ** (-2 * i / channels)
            code[t, 2 * i], code[t, 2 * i + 1] = np.sin(t * w), np.cos(t * w)
    return code


def hgru_bi(x, p, readout="xyz", origin="image_center"):
    x = np.asarray(x, np.float64)
    batch, steps, height, width, channels = x.shape
    context = x.mean(axis=(2, 3)) + time_code(steps, channels)
    gates = {}
    for name in HGRU_BI_GATES:
        raw = dense(context, p, f"{name}_gate").reshape(batch, steps, 1, height, -1)
        gates[name] = 0.1 + 0.89 * sigmoid(raw) if name.startswith("decay") else sigmoid(raw)
    k_exc = kernel_spectrum(p["k_exc"], height, width, origin)
    k_inh = kernel_spectrum(p["k_inh"], height, width, origin)
    u = [to_frequency(part) for part in np.split(dense(x, p, "input_proj"), 3, axis=-1)]
    state = np.zeros((batch, channels, height, width // 2 + 1, 3), complex)
    outputs = []
    for t in range(steps):
        g = {name: gates[name][:, t] for name in gates}
        zero = np.zeros(state.shape[:-1])
        matrix = np.stack(
            [
                np.stack([g["decay_x"] + zero, -g["mu_inhib"] * k_inh, -g["alpha_inhib"] * k_inh], -1),
                np.stack([g["mu_excit"] * k_exc, g["decay_y"] + zero, g["alpha_excit"] * k_exc], -1),
                np.stack([g["gamma"] + zero, g["delta"] + zero, g["decay_z"] + zero], -1),
            ],
            -2,
        )
        drive = np.stack([g["B"] * u[0][:, t], g["D"] * u[1][:, t], g["E"] * u[2][:, t]], -1)
        state = np.einsum("...ij,...j->...i", matrix, state) + drive
        outputs.append(g["C"][..., None] * state)
    chosen = ["xyz".index(s) for s in readout]
    spectra = np.stack(outputs, 1)[..., chosen]  # [B, T, C, H, Wf, n]
    maps = np.stack([to_space(spectra[..., s], width) for s in range(len(chosen))], -1)  # [B, T, H, W, C, n]
    y = maps.reshape(*maps.shape[:-2], -1)
    return dense(y, p, "output_proj") if len(chosen) > 1 else y


def gated(x, p, gate_type, spatial, temporal, origin="image_center"):
    x = np.asarray(x, np.float64)
    batch, steps, height, width, _ = x.shape
    m, z = np.split(dense(x, p, "in_proj"), 2, axis=-1)
    if spatial:
        before = (spatial - 1) // 2
        pad = np.pad(m, ((0, 0), (0, 0), (before, spatial - 1 - before), (before, spatial - 1 - before), (0, 0)))
        k = p["short_conv_spatial/kernel"]
        m = p["short_conv_spatial/bias"] + sum(
            k[a, b, 0] * pad[:, :, a : a + height, b : b + width] for a in range(spatial) for b in range(spatial)
        )
    if temporal:
        k, conv = p["short_conv_temporal/kernel"], np.zeros_like(m)
        for t in range(steps):
            for i in range(temporal):
                if t - (temporal - 1) + i >= 0:
                    conv[:, t] += k[i, 0] * m[:, t - (temporal - 1) + i]
        m = conv + p["short_conv_temporal/bias"]
    m = m * sigmoid(m)
    context = m.mean(axis=(2, 3))

    def raw(name):
        if gate_type == "dense":
            return dense(context, p, name).reshape(batch, steps, 1, height, -1)
        rows, cols = dense(context, p, f"{name}_h"), dense(context, p, f"{name}_w")
        return (rows[..., :, None] * cols[..., None, :])[:, :, None]

    delta, b, c = np.logaddexp(0, raw("delta_proj")), raw("B_proj"), raw("C_proj")
    k_hat = kernel_spectrum(p["kernel"], height, width, origin)
    u = to_frequency(m)
    state, outputs = 0, []
    for t in range(steps):
        state = k_hat * np.exp(-delta[:, t]) * state + (delta[:, t] + 1e-8) * b[:, t] * u[:, t]
        outputs.append(c[:, t] * state)
    y = to_space(np.stack(outputs, 1), width) * (z * sigmoid(z))
    return dense(y, p, "out_proj")


def hgru_bi_tree(p, readout="xyz"):
    """Published leaves -> this package's parameters (dense gates): gates fused, read-out [n, C, C]."""
    tree = {
        "k_exc": {"kernel": p["k_exc"]},
        "k_inh": {"kernel": p["k_inh"]},
        "input_proj": {"kernel": p["input_proj/kernel"], "bias": p["input_proj/bias"]},
        "gates": {
            "dense": {
                leaf: np.concatenate([p[f"{name}_gate/{leaf}"] for name in HGRU_BI_GATES], axis=-1)
                for leaf in ("kernel", "bias")
            }
        },
    }
    if len(readout) > 1:
        kernel = p["output_proj/kernel"]
        channels = kernel.shape[1]
        tree["output_proj"] = {
            "kernel": kernel.reshape(channels, len(readout), channels).transpose(1, 0, 2),
            "bias": p["output_proj/bias"],
        }
    return tree


def gated_tree(p, gate_type):
    """Published leaves -> this package's parameters."""
    tree = {"kernel": {"kernel": p["kernel"]}}
    for name in ("in_proj", "out_proj"):
        tree[name] = {"kernel": p[f"{name}/kernel"], "bias": p[f"{name}/bias"]}
    if "short_conv_spatial/kernel" in p:
        tree["short_conv_spatial"] = {leaf: p[f"short_conv_spatial/{leaf}"] for leaf in ("kernel", "bias")}
    if "short_conv_temporal/kernel" in p:
        tree["short_conv_temporal"] = {leaf: p[f"short_conv_temporal/{leaf}"] for leaf in ("kernel", "bias")}
    parts = [""] if gate_type == "dense" else ["_h", "_w"]
    fused = {
        leaf: np.concatenate([p[f"{g}{part}/{leaf}"] for g in ("delta_proj", "B_proj", "C_proj") for part in parts], -1)
        for leaf in ("kernel", "bias")
    }
    tree["gates"] = {"dense" if gate_type == "dense" else "factors": fused}
    return tree
