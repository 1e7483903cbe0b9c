/* The pointwise part of a step of recurrence.py, forward and backward. Compiled by recurrence_native.py.

   REAL: type of the arithmetic, of cell states and of table rows. STORE: type of what is multiplied by matrices; 16 bits for bf16.
   A thread has a range of columns, so that two rows of one table row are added in the order of the batch, whatever the threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512") /* a fifth faster than gcc's own choice */
#endif

#define COLUMNS 256 /* long enough for the prefetcher: shorter runs take up to twice as long */
#define SMALL 8192  /* elements below which threads cost more than they bring */

#include "activations.h"

#ifdef DOUBLE
static inline double expm1_(double x) { return expm1(x < 700 ? x : 700); }
#else
/* e^x - 1 to 3e-7 of its value: x = n ln 2 + r, the Taylor series of e^r - 1 to the 7th power, and 2^n by its bits. */
static inline float expm1_(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r;
    union { uint32_t bits; float value; } two = {(uint32_t)((int32_t)n + 127) << 23};
    return two.value * p + (two.value - 1);
}
#endif
static inline REAL sigmoid(REAL x) { return 1 / (2 + expm1_(-x)); }
static inline REAL tanh_(REAL x) {
    x = x > 20 ? 20 : x; /* where it is 1, and e^2x is not yet infinite */
    REAL e = expm1_(2 * x);
    return e / (e + 2);
}

/* Each block of columns of each row. */
#define EACH_BLOCK                                                                              \
    _Pragma("omp parallel for schedule(static) if (B * H >= SMALL)") for (long first = 0; first < H; first += COLUMNS) \
        for (long b = 0, last = first + COLUMNS < H ? first + COLUMNS : H; b < B; b++)

/* m = mx * u, and u kept. product, u, m: (B, H). mx: columns 4H to 5H of table rows. */
void modulate(long B, long H, const REAL *table, long width, const int64_t *rows, const STORE *restrict product, STORE *restrict u,
              STORE *restrict m) {
    EACH_BLOCK {
        const REAL *restrict mx = table + rows[b] * width + 4 * H;
#pragma omp simd
        for (long j = first; j < last; j++) {
            u[b * H + j] = product[b * H + j];
            m[b * H + j] = store(load(product[b * H + j]) * mx[j]);
        }
    }
}

/* gates, c and h from the product with m. product, gates: (B, 4H), in the order i, f, g, o. */
void cell(long B, long H, const REAL *table, long width, const int64_t *rows, const STORE *restrict product, const REAL *restrict before,
          STORE *restrict gates, REAL *restrict c, STORE *restrict h) {
    EACH_BLOCK {
        const REAL *restrict x = table + rows[b] * width;
        const STORE *restrict z = product + 4 * b * H;
        STORE *restrict gate = gates + 4 * b * H;
#pragma omp simd
        for (long j = first; j < last; j++) {
            REAL i = sigmoid(load(z[j]) + x[j]), f = sigmoid(load(z[H + j]) + x[H + j]);
            REAL g = tanh_(load(z[2 * H + j]) + x[2 * H + j]), o = sigmoid(load(z[3 * H + j]) + x[3 * H + j]);
            REAL now = f * before[b * H + j] + i * g;
            gate[j] = store(i);
            gate[H + j] = store(f);
            gate[2 * H + j] = store(g);
            gate[3 * H + j] = store(o);
            c[b * H + j] = now;
            h[b * H + j] = store(o * tanh_(now));
        }
    }
}

/* dz from the gradients of h (of the loss, and of the next step) and of c (of the loss; dc holds that of the next step and becomes that of
   the step before). dz is also added to the gradient of the table rows. grad_h and grad_c may be absent. */
void cell_backward(long B, long H, REAL *grad_table, long width, const int64_t *rows, const STORE *restrict gates,
                   const REAL *restrict before, const REAL *restrict c, const STORE *restrict grad_h, const REAL *restrict grad_c,
                   const STORE *restrict back_h, REAL *restrict dc, STORE *restrict dz) {
    EACH_BLOCK {
        REAL *restrict x = grad_table + rows[b] * width;
        const STORE *restrict gate = gates + 4 * b * H;
        STORE *restrict d = dz + 4 * b * H;
        REAL dh[COLUMNS], d_c[COLUMNS];
        for (long j = first; j < last; j++) dh[j - first] = load(back_h[b * H + j]), d_c[j - first] = dc[b * H + j];
        if (grad_h)
            for (long j = first; j < last; j++) dh[j - first] += load(grad_h[b * H + j]);
        if (grad_c)
            for (long j = first; j < last; j++) d_c[j - first] += grad_c[b * H + j];
#pragma omp simd
        for (long j = first; j < last; j++) {
            REAL i = load(gate[j]), f = load(gate[H + j]), g = load(gate[2 * H + j]), o = load(gate[3 * H + j]);
            REAL tanh_c = tanh_(c[b * H + j]), out = dh[j - first], in = d_c[j - first] + out * o * (1 - tanh_c * tanh_c);
            REAL di = in * g * i * (1 - i), df = in * before[b * H + j] * f * (1 - f), dg = in * i * (1 - g * g);
            REAL d_o = out * tanh_c * o * (1 - o);
            dc[b * H + j] = in * f;
            d[j] = store(di);
            d[H + j] = store(df);
            d[2 * H + j] = store(dg);
            d[3 * H + j] = store(d_o);
            x[j] += di;
            x[H + j] += df;
            x[2 * H + j] += dg;
            x[3 * H + j] += d_o;
        }
    }
}

/* du, and m again, from the gradient of m; that of mx is added to the gradient of the table rows. */
void modulate_backward(long B, long H, const REAL *table, REAL *grad_table, long width, const int64_t *rows, const STORE *restrict u,
                       const STORE *restrict dm, STORE *restrict du, STORE *restrict m) {
    EACH_BLOCK {
        const REAL *restrict mx = table + rows[b] * width + 4 * H;
        REAL *restrict dmx = grad_table + rows[b] * width + 4 * H;
#pragma omp simd
        for (long j = first; j < last; j++) {
            REAL u_ = load(u[b * H + j]), d = load(dm[b * H + j]);
            m[b * H + j] = store(u_ * mx[j]);
            du[b * H + j] = store(d * mx[j]);
            dmx[j] += d * u_;
        }
    }
}

/* Functions of n numbers, for the tests. */
void activations(long n, const REAL *restrict x, REAL *restrict sigmoids, REAL *restrict tanhs) {
#pragma omp simd
    for (long i = 0; i < n; i++) {
        sigmoids[i] = sigmoid(x[i]);
        tanhs[i] = tanh_(x[i]);
    }
}
