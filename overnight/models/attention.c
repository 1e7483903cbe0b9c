/* Softmax attention within each sequence of a flat batch, forward and backward, with dropout, rotary positions and windows. Compiled by attention_native.py.

   No scores are kept: the backward pass computes them again from the logarithm of each row's sum (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022,
   arXiv 2205.14135), and which weights are dropped is a function of a seed and their place. STORE: type of activations; 16 bits for bf16. The arithmetic is
   in fp32. One thread computes all of one head of one sequence, so the result does not depend on how many there are.

   Shapes: N tokens of the flat batch, S sequences, T tokens of one, H heads, E dimensions of a head. Panels are those of panels.h. */

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
#include "panels.h"
#include "attention_head.h"

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
    long row = 3 * H * E;
    int failed = 0;
#pragma omp parallel
    {
        float *memory = floats(head_memory(longest, E));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (long head = 0; head < S * H; head++) {
                long h = head % H, n0 = starts[head / H], T = starts[head / H + 1] - n0;
                const float *c = cos ? cos + n0 * (E / 2) : 0, *d = cos ? sin + n0 * (E / 2) : 0;
                head_forward(T, E, H, longest, qkv + n0 * row + h * E, row, c, d, before, after, seed, head, dropped, kept, out + (n0 * H + h) * E, H * E,
                             sums + n0 * H + h, memory);
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
        float *memory = floats(6 * most * wide + BLOCK * (3 * most + 5 * wide) + 512);
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
