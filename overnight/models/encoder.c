/* What an encoder computes between its matrix products, forward and backward. Compiled by encoder_native.py.

   STORE: type of activations; 16 bits for bf16. The arithmetic is in fp32. A row is computed by one thread, so the result does not depend on how
   many there are. Shapes: N tokens of the flat batch, S sequences, T their padded length, H heads, E dimensions of a head. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define ROWS _Pragma("omp parallel for schedule(static)")

#ifdef BF16
typedef uint16_t STORE;
static inline float load(STORE x) {
    union { uint32_t bits; float value; } v = {(uint32_t)x << 16};
    return v.value;
}
/* To the nearest, ties to even; NaN stays NaN. */
static inline STORE store(float x) {
    union { float value; uint32_t bits; } v = {x};
    uint32_t rounded = (v.bits + 0x7fffu + ((v.bits >> 16) & 1u)) >> 16;
    return x == x ? (STORE)rounded : (STORE)0x7fc0u;
}
#else
typedef float STORE;
static inline float load(STORE x) { return x; }
static inline STORE store(float x) { return x; }
#endif

/* e^x to 2e-7 of its value, 0 below -87, for x of at most 0: x = n ln 2 + r, the Taylor series of e^r, and 2^n by its bits. */
static inline float exp_(float x) {
    float n = rintf((x < -87.0f ? -87.0f : x) * 1.44269504f), r = ((x < -87.0f ? -87.0f : x) - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { uint32_t bits; float value; } two = {(uint32_t)((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : x == x ? two.value * p : x;
}

/* The normal distribution function to 8e-8 (Abramowitz and Stegun 7.1.26), and e^(-x²/2). */
static inline float normal(float x, float *bell) {
    float z = fabsf(x) * 0.70710678f, e = exp_(-z * z), t = 1.0f / (1.0f + 0.3275911f * z);
    float tail = 0.5f * e * t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    *bell = e;
    return x < 0 ? tail : 1.0f - tail;
}

/* out = gelu(a) b. x: (N, 2F), a and b side by side. out: (N, F). */
void gated_gelu(long N, long F, const STORE *x, STORE *out) {
    ROWS for (long n = 0; n < N; n++) {
        const STORE *restrict a = x + 2 * n * F, *restrict b = a + F;
        STORE *restrict o = out + n * F;
#pragma omp simd
        for (long j = 0; j < F; j++) {
            float bell, u = load(a[j]);
            o[j] = store(u * normal(u, &bell) * load(b[j]));
        }
    }
}

/* The gradient of x from that of out. */
void gated_gelu_backward(long N, long F, const STORE *x, const STORE *grad, STORE *grad_x) {
    ROWS for (long n = 0; n < N; n++) {
        const STORE *restrict a = x + 2 * n * F, *restrict b = a + F, *restrict g = grad + n * F;
        STORE *restrict ga = grad_x + 2 * n * F, *restrict gb = ga + F;
#pragma omp simd
        for (long j = 0; j < F; j++) {
            float bell, u = load(a[j]), p = normal(u, &bell), d = load(g[j]);
            gb[j] = store(d * u * p);
            ga[j] = store(d * load(b[j]) * (p + u * bell * 0.39894228f));
        }
    }
}

/* Probabilities of scores, in place: softmax(scale · x) of each row of T, over the places that its query sees (all, where mask is NULL).
   mask: row s/H·mask_s + t·mask_t of T bytes for row t of head s. */
void softmax(long heads, long H, long T, float scale, const uint8_t *mask, long mask_s, long mask_t, STORE *x) {
    ROWS for (long row = 0; row < heads * T; row++) {
        STORE *restrict p = x + row * T;
        const uint8_t *restrict seen = mask ? mask + row / T / H * mask_s + row % T * mask_t : 0;
        float values[T], top = -INFINITY, sum = 0;
        if (seen)
            for (long j = 0; j < T; j++) values[j] = seen[j] ? load(p[j]) * scale : -INFINITY;
        else
            for (long j = 0; j < T; j++) values[j] = load(p[j]) * scale;
#pragma omp simd reduction(max : top)
        for (long j = 0; j < T; j++) top = values[j] > top ? values[j] : top;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < T; j++) {
            values[j] = exp_(values[j] - top);
            sum += values[j];
        }
        float inverse = 1.0f / sum;
#pragma omp simd
        for (long j = 0; j < T; j++) p[j] = store(values[j] * inverse);
    }
}

/* The gradient of the scores from that of the probabilities p, in place. */
void softmax_backward(long rows, long T, float scale, const STORE *p, STORE *grad) {
    ROWS for (long row = 0; row < rows; row++) {
        const STORE *restrict q = p + row * T;
        STORE *restrict g = grad + row * T;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < T; j++) sum += load(q[j]) * load(g[j]);
#pragma omp simd
        for (long j = 0; j < T; j++) g[j] = store(scale * load(q[j]) * (load(g[j]) - sum));
    }
}

static inline void turn(long E, const STORE *restrict from, const float *restrict c, const float *restrict s, float sign, STORE *restrict to) {
    long half = E / 2;
#pragma omp simd
    for (long j = 0; j < half; j++) {
        float x = load(from[j]), y = load(from[half + j]), cos = c[j], sin = sign * s[j];
        to[j] = store(x * cos - y * sin);
        to[half + j] = store(y * cos + x * sin);
    }
}

/* parts[p, s, h, t] = rows[pad[s·T + t], p, h], the first two parts turned by the angles of their row (none, where cos is NULL).
   rows: (N, P, H, E), P parts side by side. parts: (P, S, H, T, E). pad: flat row of each padded place (S·T), NULL where they are alike.
   cos, sin: (N, E/2). */
void to_heads(long P, long S, long H, long T, long E, const int64_t *pad, const float *cos, const float *sin, const STORE *rows, STORE *parts) {
    ROWS for (long s = 0; s < S; s++)
        for (long t = 0; t < T; t++) {
            long n = pad ? pad[s * T + t] : s * T + t;
            for (long p = 0; p < P; p++)
                for (long h = 0; h < H; h++) {
                    const STORE *from = rows + ((n * P + p) * H + h) * E;
                    STORE *to = parts + (((p * S + s) * H + h) * T + t) * E;
                    if (cos && p < 2)
                        turn(E, from, cos + n * (E / 2), sin + n * (E / 2), 1, to);
                    else
                        memcpy(to, from, E * sizeof(STORE));
                }
        }
}

/* parts[s, h, place] = rows[n, h] for each row n and its padded place; the others are not written. rows: (N, H, E). parts: (S, H, T, E). */
void spread(long N, long H, long T, long E, const int64_t *unpad, const STORE *rows, STORE *parts) {
    ROWS for (long n = 0; n < N; n++) {
        long place = unpad ? unpad[n] : n, s = place / T, t = place % T;
        for (long h = 0; h < H; h++) memcpy(parts + ((s * H + h) * T + t) * E, rows + (n * H + h) * E, E * sizeof(STORE));
    }
}

/* The inverse of to_heads, turning back; places that are no row's are not read. unpad: padded place of each flat row (N), NULL where they are alike. */
void to_rows(long P, long N, long S, long H, long T, long E, const int64_t *unpad, const float *cos, const float *sin, const STORE *parts,
             STORE *rows) {
    ROWS for (long n = 0; n < N; n++) {
        long place = unpad ? unpad[n] : n, s = place / T, t = place % T;
        for (long p = 0; p < P; p++)
            for (long h = 0; h < H; h++) {
                STORE *to = rows + ((n * P + p) * H + h) * E;
                const STORE *from = parts + (((p * S + s) * H + h) * T + t) * E;
                if (cos && p < 2)
                    turn(E, from, cos + n * (E / 2), sin + n * (E / 2), -1, to);
                else
                    memcpy(to, from, E * sizeof(STORE));
            }
    }
}
