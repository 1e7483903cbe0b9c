/* attention.c for bf16 on processors with AMX, which multiply tiles of it: 16 × 32 and 32 × 16 in 16 cycles. Compiled by attention_native.py.

   As there nothing of size T² is kept, and one thread computes all of one head of one sequence. What is multiplied is rounded to bf16, also the weights of
   the softmax and the gradients of the scores, as flash attention on a GPU does; sums, exponentials and rotations are fp32.

   Shapes: as in attention.c. Scores are computed transposed, (keys, queries), QUERIES of a row side by side, so that all sums of the softmax go down the
   columns. Rows, columns and depths are multiples of 32, with zeros behind what is real. */

#define _DEFAULT_SOURCE /* for tiles.h */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BF16

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "activations.h"
#include "attention.h"
#include "tiles.h"

enum { QUERIES = 64 };
#define LOG2E 1.44269504f

/* (T, E) rows of bf16, `stride` apart, turned by the angles of their positions where cos is not NULL; columns up to `wide` and rows up to `most` are 0. */
ROW void take(long T, long E, long most, long wide, const STORE *from, long stride, const float *cos, const float *sin, STORE *to) {
    long half = E / 2;
    for (long t = 0; t < T; t++, from += stride, to += wide) {
        if (cos) {
            const float *restrict c = cos + t * half, *restrict s = sin + t * half;
            STORE *restrict out = to;
#pragma omp simd
            for (long j = 0; j < half; j++) {
                float x = load(from[j]), y = load(from[half + j]);
                out[j] = store(x * c[j] - y * s[j]);
                out[half + j] = store(y * c[j] + x * s[j]);
            }
        } else
            memcpy(to, from, E * sizeof(STORE));
        memset(to + E, 0, (wide - E) * sizeof(STORE));
    }
    memset(to, 0, (most - T) * wide * sizeof(STORE));
}

/* -inf for scores (T, QUERIES) of keys outside the window; the first query and the first key are `ahead` apart. */
static void hide(long T, long wide, long before, long after, long ahead, float *x) {
    for (long t = 0; t < T; t++, x += QUERIES) {
        long first = t - ahead - after, end = t - ahead + before + 1;
        if (after >= 0)
            for (long q = 0; q < least(first, wide); q++) x[q] = -INFINITY;
        if (before >= 0)
            for (long q = end > 0 ? end : 0; q < wide; q++) x[q] = -INFINITY;
    }
}

/* 2^x to 1e-7 of its value, of any x of at most 1; 0 below -126. */
static inline float exp2_(float x) {
    float n = rintf(x < -127.0f ? -127.0f : x), f = (x < -127.0f ? -127.0f : x) - n, p = 1.32644e-3f;
    p = p * f + 9.67139e-3f;
    p = p * f + 5.550734e-2f;
    p = p * f + 2.4022244e-1f;
    p = p * f + 6.9314698e-1f;
    p = p * f + 1.0f;
    union { uint32_t bits; float value; } two = {(uint32_t)((int32_t)n + 127) << 23};
    return two.value * p;
}

/* The bits of a number rounded to bf16, in the high half; a NaN that arithmetic makes stays one. */
static inline uint32_t rounded(float x) {
    union { float value; uint32_t bits; } v = {x};
    return v.bits + 0x7fffu + ((v.bits >> 16) & 1u);
}

/* A word of two. */
static inline uint32_t pair(float low, float high) { return rounded(low) >> 16 | (rounded(high) & 0xffff0000u); }

/* What the dropping of weights needs of each query of a block: the halves of its key, and the place of the first key. */
typedef struct {
    uint32_t low[QUERIES], high[QUERIES];
    long lo;
    int32_t least_kept;
    float kept;
} DROP;

static void dropping(DROP *drop, uint64_t seed, long head, long i0, long lo, long dropped, float kept) {
    if (dropped > INT32_MIN)
        for (long q = 0; q < QUERIES; q++) {
            uint64_t key = row_key(seed, head, i0 + q);
            drop->low[q] = (uint32_t)key;
            drop->high[q] = (uint32_t)(key >> 32);
        }
    drop->lo = lo;
    drop->least_kept = (int32_t)dropped;
    drop->kept = kept;
}

/* All bits set where a weight is kept, by arithmetic, since gcc does not compute branches in vectors. */
static inline uint32_t kept_mask(const DROP *drop, long t, long q) {
    return -(uint32_t)(bits(drop->low[q], drop->high[q], drop->lo + t) >= drop->least_kept);
}

/* Words p of e^(scale x - largest) of scores x (T, QUERIES), the dropped 0, rows up to `most` 0. The sum of each column before dropping, and its logarithm
   with the largest added. */
static inline __attribute__((always_inline)) void weights_(const int some, long T, long most, long wide, float scale, const DROP *restrict drop,
                                                           const float *restrict x, uint32_t *restrict p, float *restrict sum, float *restrict logarithm) {
    float top[QUERIES];
    for (long q = 0; q < wide; q++) top[q] = -INFINITY, sum[q] = 0;
    for (long t = 0; t < T; t++)
#pragma omp simd
        for (long q = 0; q < wide; q++) top[q] = x[t * QUERIES + q] > top[q] ? x[t * QUERIES + q] : top[q];
    scale *= LOG2E;
    for (long q = 0; q < wide; q++) top[q] *= scale;
    for (long t = 0; t < T; t += 2, p += QUERIES) {
        const float *restrict a = x + t * QUERIES, *restrict b = a + QUERIES;
        if (t + 1 < T)
#pragma omp simd
            for (long q = 0; q < wide; q++) {
                float first = exp2_(a[q] * scale - top[q]), second = exp2_(b[q] * scale - top[q]);
                sum[q] += first + second;
                p[q] = pair(first, second);
            }
        else
#pragma omp simd
            for (long q = 0; q < wide; q++) {
                float first = exp2_(a[q] * scale - top[q]);
                sum[q] += first;
                p[q] = pair(first, 0);
            }
        if (some)
#pragma omp simd
            for (long q = 0; q < wide; q++) p[q] &= kept_mask(drop, t, q) >> 16 | (kept_mask(drop, t + 1, q) & 0xffff0000u);
    }
    memset(p, 0, (most - T) / 2 * QUERIES * sizeof(uint32_t));
    for (long q = 0; q < wide; q++) logarithm[q] = top[q] / LOG2E + logf(sum[q]);
}

ROW void weights(long T, long most, long wide, float scale, const DROP *drop, const float *x, uint32_t *p, float *sum, float *logarithm) {
    if (drop->least_kept > INT32_MIN)
        weights_(1, T, most, wide, scale, drop, x, p, sum, logarithm);
    else
        weights_(0, T, most, wide, scale, drop, x, p, sum, logarithm);
}

/* Of scores x and gradients d of the dropped weights, both (T, QUERIES): the dropped weights w and the gradients s of the scaled scores as rows of bf16, and
   s as words; rows up to `most` are 0. */
static inline __attribute__((always_inline)) void gradients_(const int some, long T, long most, long wide, float scale, const DROP *restrict drop,
                                                             const float *restrict logarithm, float *restrict x, float *restrict d, STORE *restrict w,
                                                             STORE *restrict s, uint32_t *restrict words) {
    float sum[QUERIES], top[QUERIES];
    scale *= LOG2E;
    for (long q = 0; q < wide; q++) sum[q] = 0, top[q] = logarithm[q] * LOG2E;
    for (long t = 0; t < T; t++) {
        float *restrict xs = x + t * QUERIES, *restrict ds = d + t * QUERIES;
        STORE *restrict ws = w + t * QUERIES;
#pragma omp simd
        for (long q = 0; q < wide; q++) {
            union { float value; uint32_t bits; } kept = {some ? drop->kept : 1.0f};
            if (some) kept.bits &= kept_mask(drop, t, q);
            float weight = exp2_(xs[q] * scale - top[q]), g = ds[q] * kept.value;
            ws[q] = (STORE)(rounded(weight * kept.value) >> 16);
            xs[q] = weight;
            ds[q] = g;
            sum[q] += weight * g;
        }
    }
    /* One row more where T is odd: weights of 0. */
    if (T < most) memset(x + T * QUERIES, 0, QUERIES * sizeof(float)), memset(d + T * QUERIES, 0, QUERIES * sizeof(float));
    for (long t = 0; t < T; t += 2, words += QUERIES) {
        const float *restrict x0 = x + t * QUERIES, *restrict x1 = x0 + QUERIES, *restrict d0 = d + t * QUERIES, *restrict d1 = d0 + QUERIES;
        STORE *restrict s0 = s + t * QUERIES, *restrict s1 = s0 + QUERIES;
#pragma omp simd
        for (long q = 0; q < wide; q++) {
            uint32_t both = pair(x0[q] * (d0[q] - sum[q]), x1[q] * (d1[q] - sum[q]));
            s0[q] = (STORE)both;
            s1[q] = (STORE)(both >> 16);
            words[q] = both;
        }
    }
    memset(words, 0, (most - T) / 2 * QUERIES * sizeof(uint32_t));
    memset(w + T * QUERIES, 0, (most - T) * QUERIES * sizeof(STORE));
    memset(s + T * QUERIES, 0, (most - T) * QUERIES * sizeof(STORE));
}

ROW void gradients(long T, long most, long wide, float scale, const DROP *drop, const float *logarithm, float *x, float *d, STORE *w, STORE *s,
                   uint32_t *words) {
    if (drop->least_kept > INT32_MIN)
        gradients_(1, T, most, wide, scale, drop, logarithm, x, d, w, s, words);
    else
        gradients_(0, T, most, wide, scale, drop, logarithm, x, d, w, s, words);
}

/* Keys that the queries i0 to i0 + rows see: from a multiple of 32 to *end. */
static long seen(long i0, long rows, long T, long before, long after, long *end) {
    *end = after < 0 ? T : least(T, i0 + rows + after);
    return before < 0 || i0 <= before ? 0 : (i0 - before) / 32 * 32;
}

/* As in attention.c. */
int attend(long S, long H, long E, long longest, const int32_t *starts, const STORE *qkv, const float *cos, const float *sin, long before, long after,
           uint64_t seed, long dropped, float kept, STORE *out, float *sums) {
    long wide = up(E), most = up(longest), row = 3 * H * E;
    float scale = 1 / sqrtf((float)E);
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (2 * most * wide + QUERIES * (2 * most + 3 * wide) + 256) * sizeof(float));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            TILES saved = take_tiles();
#pragma omp for schedule(dynamic)
            for (long head = 0; head < S * H; head++) {
                float *free_ = memory;
                long s = head / H, h = head % H, n0 = starts[s], T = starts[s + 1] - n0, deep = up(T);
                STORE *keys = (STORE *)part(&free_, most * wide / 2), *values = (STORE *)part(&free_, most * wide / 2);
                STORE *value_rows = (STORE *)part(&free_, most * wide / 2), *q = (STORE *)part(&free_, QUERIES * wide / 2);
                uint32_t *pairs = (uint32_t *)part(&free_, most * wide / 2), *qt = (uint32_t *)part(&free_, QUERIES * wide / 2);
                uint32_t *p = (uint32_t *)part(&free_, QUERIES * most / 2);
                float *x = part(&free_, QUERIES * most), *ot = part(&free_, QUERIES * wide), *o = part(&free_, QUERIES * wide);
                const STORE *from = qkv + n0 * row + h * E;
                const float *c = cos ? cos + n0 * (E / 2) : 0, *d = cos ? sin + n0 * (E / 2) : 0;
                DROP drop;
                take(T, E, deep, wide, from + H * E, row, c, d, keys);
                take(T, E, deep, wide, from + 2 * H * E, row, 0, 0, value_rows);
                interleave(deep, wide, value_rows, wide, pairs);
                transposed(deep / 2, wide, pairs, wide, values, deep / 2);
                for (long i0 = 0; i0 < T; i0 += QUERIES) {
                    long rows = least(QUERIES, T - i0), across = up(rows), hi, lo = seen(i0, rows, T, before, after, &hi), many = hi - lo, padded = up(many);
                    float sum[QUERIES], logarithm[QUERIES];
                    take(rows, E, across, wide, from + i0 * row, row, c ? c + i0 * (E / 2) : 0, c ? d + i0 * (E / 2) : 0, q);
                    transposed(across, wide / 2, q, wide / 2, qt, QUERIES);
                    product(padded, across, wide, keys + lo * wide, wide, qt, QUERIES, x, QUERIES, 0);
                    hide(many, across, before, after, i0 - lo, x);
                    dropping(&drop, seed, head, i0, lo, dropped, kept);
                    weights(many, padded, across, scale, &drop, x, p, sum, logarithm);
                    product(wide, across, padded, values + lo, deep, p, QUERIES, ot, QUERIES, 0);
                    transposed(wide, across, ot, QUERIES, o, wide);
                    for (long m = 0; m < rows; m++) {
                        STORE *restrict to = out + ((n0 + i0 + m) * H + h) * E;
                        float inverse = kept / sum[m];
                        for (long e = 0; e < E; e++) to[e] = store(o[m * wide + e] * inverse);
                        sums[(n0 + i0 + m) * H + h] = logarithm[m];
                    }
                }
            }
            give_tiles(saved);
        }
        free(memory);
    }
    return !failed;
}

/* As in attention.c. */
int attend_backward(long S, long H, long E, long longest, const int32_t *starts, const STORE *qkv, const float *cos, const float *sin, long before,
                    long after, uint64_t seed, long dropped, float kept, const STORE *grad, const float *sums, STORE *grad_qkv) {
    long wide = up(E), most = up(longest), row = 3 * H * E;
    float scale = 1 / sqrtf((float)E);
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (4 * most * wide + QUERIES * (4 * most + 5 * wide) + 512) * sizeof(float));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            TILES saved = take_tiles();
#pragma omp for schedule(dynamic)
            for (long head = 0; head < S * H; head++) {
                float *free_ = memory;
                long s = head / H, h = head % H, n0 = starts[s], T = starts[s + 1] - n0, deep = up(T);
                STORE *keys = (STORE *)part(&free_, most * wide / 2), *values = (STORE *)part(&free_, most * wide / 2);
                STORE *turned = (STORE *)part(&free_, most * wide / 2), *q = (STORE *)part(&free_, QUERIES * wide / 2);
                STORE *g = (STORE *)part(&free_, QUERIES * wide / 2), *w = (STORE *)part(&free_, QUERIES * most / 2);
                STORE *ds = (STORE *)part(&free_, QUERIES * most / 2);
                uint32_t *pairs = (uint32_t *)part(&free_, most * wide / 2), *qt = (uint32_t *)part(&free_, QUERIES * wide / 2);
                uint32_t *gt = (uint32_t *)part(&free_, QUERIES * wide / 2), *q_pairs = (uint32_t *)part(&free_, QUERIES * wide / 2);
                uint32_t *g_pairs = (uint32_t *)part(&free_, QUERIES * wide / 2), *words = (uint32_t *)part(&free_, QUERIES * most / 2);
                float *grad_k = part(&free_, most * wide), *grad_v = part(&free_, most * wide), *x = part(&free_, QUERIES * most);
                float *dx = part(&free_, QUERIES * most), *grad_qt = part(&free_, QUERIES * wide), *grad_q = part(&free_, QUERIES * wide);
                const STORE *from = qkv + n0 * row + h * E;
                STORE *to = grad_qkv + n0 * row + h * E;
                const float *c = cos ? cos + n0 * (E / 2) : 0, *d = cos ? sin + n0 * (E / 2) : 0;
                DROP drop;
                take(T, E, deep, wide, from + H * E, row, c, d, keys);
                take(T, E, deep, wide, from + 2 * H * E, row, 0, 0, values);
                interleave(deep, wide, keys, wide, pairs);
                transposed(deep / 2, wide, pairs, wide, turned, deep / 2);
                memset(grad_k, 0, deep * wide * sizeof(float));
                memset(grad_v, 0, deep * wide * sizeof(float));
                for (long i0 = 0; i0 < T; i0 += QUERIES) {
                    long rows = least(QUERIES, T - i0), across = up(rows), hi, lo = seen(i0, rows, T, before, after, &hi), many = hi - lo, padded = up(many);
                    const float *ci = c ? c + i0 * (E / 2) : 0, *di = c ? d + i0 * (E / 2) : 0;
                    float logarithm[QUERIES] = {0};
                    for (long m = 0; m < rows; m++) logarithm[m] = sums[(n0 + i0 + m) * H + h];
                    take(rows, E, across, wide, from + i0 * row, row, ci, di, q);
                    take(rows, E, across, wide, grad + ((n0 + i0) * H + h) * E, H * E, 0, 0, g);
                    interleave(across, wide, q, wide, q_pairs);
                    interleave(across, wide, g, wide, g_pairs);
                    transposed(across, wide / 2, q, wide / 2, qt, QUERIES);
                    transposed(across, wide / 2, g, wide / 2, gt, QUERIES);
                    product(padded, across, wide, keys + lo * wide, wide, qt, QUERIES, x, QUERIES, 0);
                    product(padded, across, wide, values + lo * wide, wide, gt, QUERIES, dx, QUERIES, 0);
                    hide(many, across, before, after, i0 - lo, x);
                    dropping(&drop, seed, head, i0, lo, dropped, kept);
                    gradients(many, padded, across, scale, &drop, logarithm, x, dx, w, ds, words);
                    product(padded, wide, across, w, QUERIES, g_pairs, wide, grad_v + lo * wide, wide, 1);
                    product(padded, wide, across, ds, QUERIES, q_pairs, wide, grad_k + lo * wide, wide, 1);
                    product(wide, across, padded, turned + lo, deep, words, QUERIES, grad_qt, QUERIES, 0);
                    transposed(wide, across, grad_qt, QUERIES, grad_q, wide);
                    give(rows, E, wide, grad_q, scale, ci, di, to + i0 * row, row);
                }
                give(T, E, wide, grad_k, scale, c, d, to + H * E, row);
                give(T, E, wide, grad_v, 1, 0, 0, to + 2 * H * E, row);
            }
            give_tiles(saved);
        }
        free(memory);
    }
    return !failed;
}
