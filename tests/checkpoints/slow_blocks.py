"""Decoders of ggml blocks, one value at a time: what the reader's dequantizers are compared with.

Written from the struct layouts and scalar loops of ggml-quants.c; shares nothing with the `gguf` package. Each takes
the bytes of one block and returns its values.
"""

from __future__ import annotations

import struct


def _halves(block: bytes, at: int, count: int) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}e", block, at)


def q4_0(block: bytes) -> list[float]:
    (d,) = _halves(block, 0, 1)
    qs = block[2:18]
    return [((q & 15) - 8) * d for q in qs] + [((q >> 4) - 8) * d for q in qs]


def q4_1(block: bytes) -> list[float]:
    d, m = _halves(block, 0, 2)
    qs = block[4:20]
    return [(q & 15) * d + m for q in qs] + [(q >> 4) * d + m for q in qs]


def _fifth_bits(block: bytes, at: int) -> list[int]:
    (high,) = struct.unpack_from("<I", block, at)
    return [(high >> j & 1) << 4 for j in range(32)]


def q5_0(block: bytes) -> list[float]:
    (d,) = _halves(block, 0, 1)
    high, qs = _fifth_bits(block, 2), block[6:22]
    low = [q & 15 for q in qs] + [q >> 4 for q in qs]
    return [((a | b) - 16) * d for a, b in zip(low, high, strict=True)]


def q5_1(block: bytes) -> list[float]:
    d, m = _halves(block, 0, 2)
    high, qs = _fifth_bits(block, 4), block[8:24]
    low = [q & 15 for q in qs] + [q >> 4 for q in qs]
    return [(a | b) * d + m for a, b in zip(low, high, strict=True)]


def q8_0(block: bytes) -> list[float]:
    (d,) = _halves(block, 0, 1)
    return [q * d for q in struct.unpack_from("<32b", block, 2)]


def _scale_and_min(scales: bytes, j: int) -> tuple[int, int]:
    """The j-th pair of 6-bit numbers packed into 12 bytes (get_scale_min_k4)."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def q4_k(block: bytes) -> list[float]:
    d, dmin = _halves(block, 0, 2)
    scales, qs = block[4:16], block[16:144]
    out = []
    for j in range(8):  # groups of 32 values; two groups share 32 bytes
        scale, low = _scale_and_min(scales, j)
        for position in range(32):
            q = qs[32 * (j // 2) + position]
            out.append(d * scale * (q & 15 if j % 2 == 0 else q >> 4) - dmin * low)
    return out


def q5_k(block: bytes) -> list[float]:
    d, dmin = _halves(block, 0, 2)
    scales, qh, qs = block[4:16], block[16:48], block[48:176]
    out = []
    for j in range(8):
        scale, low = _scale_and_min(scales, j)
        for position in range(32):
            q = qs[32 * (j // 2) + position]
            nibble = q & 15 if j % 2 == 0 else q >> 4
            out.append(d * scale * (nibble + 16 * (qh[position] >> j & 1)) - dmin * low)
    return out


def q6_k(block: bytes) -> list[float]:
    ql, qh = block[0:128], block[128:192]
    scales = struct.unpack_from("<16b", block, 192)
    (d,) = _halves(block, 208, 1)
    out = [0.0] * 256
    for half in range(2):
        for position in range(32):
            a, b = ql[64 * half + position], ql[64 * half + position + 32]
            high = qh[32 * half + position]
            for quarter, low in enumerate((a & 15, b & 15, a >> 4, b >> 4)):
                q = (low | (high >> 2 * quarter & 3) << 4) - 32
                scale = scales[8 * half + 2 * quarter + position // 16]
                out[128 * half + 32 * quarter + position] = d * scale * q
    return out


# name: (decoder, values per block, bytes per block, where the 16-bit floats of the block begin)
FORMATS = {
    "Q4_0": (q4_0, 32, 18, (0,)),
    "Q4_1": (q4_1, 32, 20, (0, 2)),
    "Q5_0": (q5_0, 32, 22, (0,)),
    "Q5_1": (q5_1, 32, 24, (0, 2)),
    "Q8_0": (q8_0, 32, 34, (0,)),
    "Q4_K": (q4_k, 256, 144, (0, 2)),
    "Q5_K": (q5_k, 256, 176, (0, 2)),
    "Q6_K": (q6_k, 256, 210, (208,)),
}
