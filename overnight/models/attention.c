/* Softmax attention within each sequence of a flat batch, forward and backward, with dropout, rotary positions and windows. Compiled by attention_native.py.

   No scores are kept: the backward pass computes them again from the logarithm of each row's sum (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022,
   arXiv 2205.14135), and which weights are dropped is a function of a seed and their place. STORE: type of activations; 16 bits for bf16. The arithmetic is
   in fp32. One thread computes all of one head of one sequence, so the result does not depend on how many there are.

   Shapes: N tokens of the flat batch, S sequences, T tokens of one, H heads, E dimensions of a head. A panel is VW·NV columns of a matrix side by side,
   row after row, the last one as narrow as whole vectors allow; what is beyond the matrix is 0. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "activations.h"
#include "attention.h"

/* Floats of a vector, vectors of a panel, rows of a tile: MR·NV sums fit the registers. */
#ifdef __AVX512F__
enum { VW = 16, NV = 4, MR = 6 };
#else
enum { VW = 8, NV = 2, MR = 6 };
#endif
enum { NR = VW * NV, BLOCK = 48 };
typedef float VEC __attribute__((vector_size(VW * sizeof(float)), aligned(4), may_alias));

static inline long up(long n) { return (n + VW - 1) / VW * VW; }

/* C (rows × vectors·VW) = or += A B, all sums in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, long K, const float *A, long a_row, long a_col, const float *B,
                                                       float *C, long ldc, int add) {
    VEC sum[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[m][v] = add ? *(const VEC *)(C + m * ldc + v * VW) : (VEC){0};
    for (long k = 0; k < K; k++, A += a_col, B += vectors * VW) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            float a = A[m * a_row];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[m][v] += a * *(const VEC *)(B + v * VW);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(VEC *)(C + m * ldc + v * VW) = sum[m][v];
}

static inline __attribute__((always_inline)) void strip(const int vectors, long M, long K, const float *A, long a_row, long a_col, const float *B, float *C,
                                                        long ldc, int add) {
    long m = 0;
    for (; m + MR <= M; m += MR) tile(MR, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add);
    for (; m + 2 <= M; m += 2) tile(2, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add);
    for (; m < M; m++) tile(1, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add);
}

/* C (M, N) = or += A B. A[m, k] is at m·a_row + k·a_col. B: panels, `step` floats apart, of which rows `first` to first + K are used. N: whole vectors. */
static void product(long M, long N, long K, const float *A, long a_row, long a_col, const float *B, long step, long first, float *C, long ldc, int add) {
    for (long n = 0; n < N; n += NR, B += step) {
        long vectors = least(NR, N - n) / VW;
        const float *from = B + first * vectors * VW;
        if (vectors == NV)
            strip(NV, M, K, A, a_row, a_col, from, C + n, ldc, add);
        else if (vectors == 1)
            strip(1, M, K, A, a_row, a_col, from, C + n, ldc, add);
        else if (vectors == 2)
            strip(NV < 2 ? NV : 2, M, K, A, a_row, a_col, from, C + n, ldc, add);
        else
            strip(NV < 3 ? NV : 3, M, K, A, a_row, a_col, from, C + n, ldc, add);
    }
}

/* (T, E) rows in fp32, `stride` apart, times a factor, turned by the angles of their positions where cos is not NULL; columns up to `wide` are 0. */
static void take(long T, long E, long wide, const STORE *from, long stride, float factor, const float *cos, const float *sin, float *to) {
    long half = E / 2;
    for (long t = 0; t < T; t++, from += stride, to += wide) {
        if (cos) {
            const float *restrict c = cos + t * half, *restrict s = sin + t * half;
            for (long j = 0; j < half; j++) {
                float x = load(from[j]), y = load(from[half + j]);
                to[j] = (x * c[j] - y * s[j]) * factor;
                to[half + j] = (y * c[j] + x * s[j]) * factor;
            }
        } else
            for (long j = 0; j < E; j++) to[j] = load(from[j]) * factor;
        for (long j = E; j < wide; j++) to[j] = 0;
    }
}

/* Panels of (T, wide) rows: the rows themselves where one panel is as wide, else a copy. */
static const float *panels(long T, long wide, const float *rows, float *to) {
    if (wide <= NR) return rows;
    float *at = to;
    for (long n = 0; n < wide; n += NR) {
        long w = least(NR, wide - n);
        for (long t = 0; t < T; t++, at += w) memcpy(at, rows + t * wide + n, w * sizeof(float));
    }
    return to;
}

/* Panels of the transpose: E rows of T columns, 0 up to whole vectors. */
static void transposed(long T, long E, long wide, const float *rows, float *to) {
    for (long n = 0; n < up(T); n += NR) {
        long w = least(NR, up(T) - n), real = least(w, T - n);
        for (long e = 0; e < E; e++, to += w) {
            for (long c = 0; c < real; c++) to[c] = rows[(n + c) * wide + e];
            for (long c = real; c < w; c++) to[c] = 0;
        }
    }
}

/* Keys that the rows i0 to i0 + rows see: from a whole panel's first to *end. */
static long seen(long i0, long rows, long T, long before, long after, long *end) {
    *end = after < 0 ? T : least(T, i0 + rows + after);
    return before < 0 || i0 <= before ? 0 : (i0 - before) / NR * NR;
}

/* Columns of the panels that hold keys lo to hi. */
static long whole(long lo, long hi, long T) { return least((hi - lo + NR - 1) / NR * NR, up(T) - lo); }

/* Scores (BLOCK, wide) of some queries with the keys from lo to hi; -inf outside the window. */
static void scores(long rows, long E, long T, long i0, long lo, long hi, long before, long after, const float *q, long q_wide, const float *keys, float *x,
                   long wide) {
    product(rows, whole(lo, hi, T), E, q, q_wide, 1, keys + lo * E, NR * E, 0, x, wide, 0);
    for (long m = 0; m < rows; m++, x += wide) {
        if (before >= 0)
            for (long j = lo; j < least(hi, i0 + m - before); j++) x[j - lo] = -INFINITY;
        if (after >= 0)
            for (long j = i0 + m + after + 1; j < hi; j++) x[j - lo] = -INFINITY;
    }
}

/* e^(x - largest) in place of the scores x of a row; returns their sum, and its logarithm with the largest added. */
ROW float weights(long T, float *restrict x, float *logarithm) {
    float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (long j = 0; j < T; j++) top = x[j] > top ? x[j] : top;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < T; j++) {
        float e = exp_(x[j] - top);
        x[j] = e;
        sum += e;
    }
    *logarithm = top + logf(sum);
    return sum;
}

/* 0 in place of the dropped of the weights of a row, whose first is at place lo. */
ROW void drop(long T, long lo, uint64_t key, long dropped, float *restrict x) {
    int32_t least_kept = (int32_t)dropped;
#pragma omp simd
    for (long j = 0; j < T; j++) x[j] = bits((uint32_t)key, (uint32_t)(key >> 32), lo + j) >= least_kept ? x[j] : 0.0f;
}

/* Of a row: p, scores, becomes the weights; x, the gradient of the dropped weights, that of the scores; w the dropped weights. */
ROW void gradients(long T, long lo, uint64_t key, long dropped, float kept, float logarithm, float *restrict p, float *restrict x, float *restrict w) {
    int32_t least_kept = (int32_t)dropped;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < T; j++) {
        float weight = exp_(p[j] - logarithm), keep = bits((uint32_t)key, (uint32_t)(key >> 32), lo + j) >= least_kept ? kept : 0.0f, d = x[j] * keep;
        w[j] = weight * keep;
        p[j] = weight;
        x[j] = d;
        sum += weight * d;
    }
#pragma omp simd
    for (long j = 0; j < T; j++) x[j] = p[j] * (x[j] - sum);
}

/* out (N, H·E) and sums (N, H), the logarithm of the sum of e^scores, from qkv (N, 3, H, E). starts: (S + 1). longest: at least each T.
   A weight is dropped where its bits are below `dropped` (-2^31: none), and the others are multiplied by `kept`. before, after: tokens to either side that
   one sees, -1 for all. cos, sin: (N, E/2), or NULL. Returns 0 where there is no memory. */
int attend(long S, long H, long E, long longest, const int32_t *starts, const STORE *qkv, const float *cos, const float *sin, long before, long after,
           uint64_t seed, long dropped, float kept, STORE *out, float *sums) {
    long wide = up(E), most = up(longest), row = 3 * H * E;
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (3 * most * wide + BLOCK * (most + 2 * wide) + 256) * sizeof(float));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (long head = 0; head < S * H; head++) {
                float *free_ = memory;
                long s = head / H, h = head % H, n0 = starts[s], T = starts[s + 1] - n0;
                float *plain = part(&free_, most * wide), *keys = part(&free_, most * wide), *copy = part(&free_, most * wide);
                float *q = part(&free_, BLOCK * wide), *o = part(&free_, BLOCK * wide), *x = part(&free_, BLOCK * most);
                const STORE *from = qkv + n0 * row + h * E;
                const float *c = cos ? cos + n0 * (E / 2) : 0, *d = cos ? sin + n0 * (E / 2) : 0;
                take(T, E, wide, from + H * E, row, 1, c, d, plain);
                transposed(T, E, wide, plain, keys);
                take(T, E, wide, from + 2 * H * E, row, 1, 0, 0, plain);
                const float *values = panels(T, wide, plain, copy);
                for (long i0 = 0; i0 < T; i0 += BLOCK) {
                    long rows = least(BLOCK, T - i0), hi, lo = seen(i0, rows, T, before, after, &hi), many = hi - lo;
                    take(rows, E, wide, from + i0 * row, row, 1 / sqrtf((float)E), c ? c + i0 * (E / 2) : 0, c ? d + i0 * (E / 2) : 0, q);
                    scores(rows, E, T, i0, lo, hi, before, after, q, wide, keys, x, most);
                    float inverse[BLOCK];
                    for (long m = 0; m < rows; m++) {
                        float sum = weights(many, x + m * most, &sums[(n0 + i0 + m) * H + h]);
                        if (dropped > INT32_MIN) drop(many, lo, row_key(seed, head, i0 + m), dropped, x + m * most);
                        inverse[m] = kept / sum;
                    }
                    product(rows, wide, many, x, most, 1, values, T * NR, lo, o, wide, 0);
                    for (long m = 0; m < rows; m++) {
                        STORE *restrict to = out + ((n0 + i0 + m) * H + h) * E;
                        for (long e = 0; e < E; e++) to[e] = store(o[m * wide + e] * inverse[m]);
                    }
                }
            }
        }
        free(memory);
    }
    return !failed;
}

/* The gradient of qkv from that of out. */
int attend_backward(long S, long H, long E, long longest, const int32_t *starts, const STORE *qkv, const float *cos, const float *sin, long before,
                    long after, uint64_t seed, long dropped, float kept, const STORE *grad, const float *sums, STORE *grad_qkv) {
    long wide = up(E), most = up(longest), row = 3 * H * E;
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (6 * most * wide + BLOCK * (3 * most + 5 * wide) + 512) * sizeof(float));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (long head = 0; head < S * H; head++) {
                float *free_ = memory;
                long s = head / H, h = head % H, n0 = starts[s], T = starts[s + 1] - n0;
                float *plain = part(&free_, most * wide), *keys = part(&free_, most * wide), *values = part(&free_, most * wide);
                float *copy = part(&free_, most * wide), *grad_k = part(&free_, most * wide), *grad_v = part(&free_, most * wide);
                float *q = part(&free_, BLOCK * wide), *g = part(&free_, BLOCK * wide), *q_copy = part(&free_, BLOCK * wide), *g_copy = part(&free_, BLOCK * wide);
                float *grad_q = part(&free_, BLOCK * wide), *p = part(&free_, BLOCK * most), *x = part(&free_, BLOCK * most), *w = part(&free_, BLOCK * most);
                const STORE *from = qkv + n0 * row + h * E;
                STORE *to = grad_qkv + n0 * row + h * E;
                const float *c = cos ? cos + n0 * (E / 2) : 0, *d = cos ? sin + n0 * (E / 2) : 0;
                float scale = 1 / sqrtf((float)E);
                take(T, E, wide, from + 2 * H * E, row, 1, 0, 0, plain);
                transposed(T, E, wide, plain, values);
                take(T, E, wide, from + H * E, row, 1, c, d, plain);
                transposed(T, E, wide, plain, keys);
                const float *key_rows = panels(T, wide, plain, copy);
                memset(grad_k, 0, T * wide * sizeof(float));
                memset(grad_v, 0, T * wide * sizeof(float));
                for (long i0 = 0; i0 < T; i0 += BLOCK) {
                    long rows = least(BLOCK, T - i0), hi, lo = seen(i0, rows, T, before, after, &hi), many = hi - lo;
                    const float *ci = c ? c + i0 * (E / 2) : 0, *di = c ? d + i0 * (E / 2) : 0;
                    take(rows, E, wide, from + i0 * row, row, scale, ci, di, q);
                    take(rows, E, wide, grad + ((n0 + i0) * H + h) * E, H * E, 1, 0, 0, g);
                    const float *qp = panels(rows, wide, q, q_copy), *gp = panels(rows, wide, g, g_copy);
                    scores(rows, E, T, i0, lo, hi, before, after, q, wide, keys, p, most);
                    product(rows, whole(lo, hi, T), E, g, wide, 1, values + lo * E, NR * E, 0, x, most, 0);
                    for (long m = 0; m < rows; m++) {
                        uint64_t key = row_key(seed, head, i0 + m);
                        gradients(many, lo, key, dropped, kept, sums[(n0 + i0 + m) * H + h], p + m * most, x + m * most, w + m * most);
                    }
                    product(many, wide, rows, w, 1, most, gp, rows * NR, 0, grad_v + lo * wide, wide, 1);
                    product(many, wide, rows, x, 1, most, qp, rows * NR, 0, grad_k + lo * wide, wide, 1);
                    product(rows, wide, many, x, most, 1, key_rows, T * NR, lo, grad_q, wide, 0);
                    give(rows, E, wide, grad_q, scale, ci, di, to + i0 * row, row);
                }
                give(T, E, wide, grad_k, 1, c, d, to + H * E, row);
                give(T, E, wide, grad_v, 1, 0, 0, to + 2 * H * E, row);
            }
        }
        free(memory);
    }
    return !failed;
}
