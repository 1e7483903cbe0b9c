/* An encoder in one call, from token ids to hidden states, in fp32, of a network that is trained no more. Compiled by forward_native.py.

   Of a single text Python and torch take as long between the operations as the matrix products, whose weights come from memory or the last cache. So they are laid
   out once in the order in which they are read, and what follows is fetched while they are multiplied. One thread computes all of one number, so
   the result does not depend on how many there are, nor on what else is in the batch.

   Shapes: N tokens of the flat batch, S sequences, D width, H heads, F width inside the feed-forward part. Rows in memory are `up` of their width apart. */

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

/* Rows of a part of a product that one thread computes, and rows of a panel that are used at a time: with those that are fetched meanwhile they fit the cache. */
enum { ROWS = 48, DEPTH = 128 };

/* Weight and bias of each map of a layer, NULL where there is none; weights of products as panels of their transposes. */
enum { NORM1, QKV, OUT, NORM2, UP, DOWN, MAPS };
typedef const float *MAP[2];

/* How a sequence is seen by attention: tokens before and behind that a token sees (-1: all), and angles of its places (T, E/2), or NULL. */
typedef struct {
    long before, after;
    const float *cos, *sin;
} VIEW;

/* Tables (rows, D) whose rows are added up, of each token that of its number (N); NULL where there is no such table. And their norm. */
enum { TABLES = 3 };
typedef struct {
    const float *table[TABLES];
    const int64_t *numbers[TABLES];
    long rows[TABLES];
    MAP norm;
} EMBEDDING;

/* Sizes of a network and a batch. gated: layers of ModernBERT, else BERT's. */
typedef struct {
    long N, S, D, H, F, longest, gated;
    float eps;
} SIZES;

/* Whether this is faster than torch here: measured where vectors are of 8 floats and more. */
int worthwhile(void) {
#ifdef __AVX2__
    return 1;
#else
    return 0;
#endif
}

/* Floats of a weight (M, K) as panels. */
long packed_size(long M, long K) { return up(M) * K; }

void pack(long M, long K, const float *weight, float *to) { transposed(M, K, K, weight, to); }

/* x = x + bias, or of that gelu. */
ROW void finish(long M, const float *restrict bias, int gelu, float *restrict x) {
    if (bias)
#pragma omp simd
        for (long j = 0; j < M; j++) x[j] += bias[j];
    if (gelu)
#pragma omp simd
        for (long j = 0; j < M; j++) {
            float bell;
            x[j] *= normal(x[j], &bell);
        }
}

/* y (N, M) = or += x W + bias, or of that gelu. x: (N, K). Called by all threads, which wait for one another at its end. */
static void multiply(long N, long M, long K, const float *x, long ldx, const MAP map, int gelu, int add, float *y, long ldy) {
    long panels = (M + NR - 1) / NR, parts = (N + ROWS - 1) / ROWS * panels;
#pragma omp for schedule(static)
    for (long at = 0; at < parts; at++) {
        long n = at / panels * ROWS, rows = least(ROWS, N - n), m = at % panels * NR, columns = least(NR, M - m);
        const float *W = map[0] + m * K;
        float *to = y + n * ldy + m;
        for (long k = 0, deep; k < K; k += deep, W += deep * up(columns)) {
            deep = least(DEPTH, K - k);
            panel(rows, up(columns), deep, x + n * ldx + k, ldx, 1, W, to, ldy, add || k, W + deep * up(columns));
        }
        for (long i = 0; (map[1] || gelu) && i < rows; i++) finish(columns, map[1] ? map[1] + m : NULL, gelu, to + i * ldy);
    }
}

ROW void norm_row(long D, const float *x, const MAP map, float eps, float *y) {
    const float *restrict weight = map[0], *restrict bias = map[1];
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < D; j++) sum += x[j];
    float mean = sum / (float)D;
#pragma omp simd reduction(+ : squares)
    for (long j = 0; j < D; j++) squares += (x[j] - mean) * (x[j] - mean);
    float scale = 1 / sqrtf(squares / (float)D + eps);
#pragma omp simd
    for (long j = 0; j < D; j++) y[j] = (x[j] - mean) * scale * weight[j];
    if (bias)
#pragma omp simd
        for (long j = 0; j < D; j++) y[j] += bias[j];
}

/* y = LayerNorm(x), which may be in place of x. */
static void norm(const SIZES *z, const float *x, const MAP map, float *y) {
#pragma omp for schedule(static)
    for (long n = 0; n < z->N; n++) norm_row(z->D, x + n * up(z->D), map, z->eps, y + n * up(z->D));
}

/* Whether all numbers are those of rows of their tables. */
static int known(const SIZES *z, const EMBEDDING *e) {
    for (int t = 0; t < TABLES; t++)
        for (long n = 0; e->table[t] && n < z->N; n++)
            if (e->numbers[t][n] < 0 || e->numbers[t][n] >= e->rows[t]) return 0;
    return 1;
}

static void embed(const SIZES *z, const EMBEDDING *e, float *x) {
    long D = z->D;
#pragma omp for schedule(static)
    for (long n = 0; n < z->N; n++) {
        float *row = x + n * up(D);
        memcpy(row, e->table[0] + e->numbers[0][n] * D, D * sizeof(float));
        for (int t = 1; t < TABLES; t++)
            if (e->table[t]) finish(D, e->table[t] + e->numbers[t][n] * D, 0, row);
        norm_row(D, row, e->norm, z->eps, row);
    }
}

/* y (N, H·E) from qkv (N, 3, H, E). */
static void attend(const SIZES *z, const VIEW *view, const int32_t *starts, const float *qkv, float *y, float *memory) {
    long E = z->D / z->H, row = up(3 * z->D);
#pragma omp for schedule(dynamic)
    for (long head = 0; head < z->S * z->H; head++) {
        long h = head % z->H, n = starts[head / z->H], T = starts[head / z->H + 1] - n;
        head_forward(T, E, z->H, z->longest, qkv + n * row + h * E, row, view->cos, view->sin, view->before, view->after, 0, head, INT32_MIN, 1,
                     y + n * up(z->D) + h * E, up(z->D), NULL, memory);
    }
}

/* a = gelu(a) b of rows (2F), a and b side by side. */
ROW void gate(long F, float *restrict a) {
    const float *restrict b = a + F;
#pragma omp simd
    for (long j = 0; j < F; j++) {
        float bell;
        a[j] *= normal(a[j], &bell) * b[j];
    }
}

/* x = x + attention(norm(x)), x = x + ffn(norm(x)), with a gated GELU. y: (N, D), wide: (N, 3D or 2F), both to work in. */
static void modern_layer(const SIZES *z, const VIEW *view, const int32_t *starts, const MAP *map, float *x, float *y, float *wide, float *memory) {
    long D = z->D, inner = up(2 * z->F);
    if (map[NORM1][0]) norm(z, x, map[NORM1], y);
    multiply(z->N, 3 * D, D, map[NORM1][0] ? y : x, up(D), map[QKV], 0, 0, wide, up(3 * D));
    attend(z, view, starts, wide, y, memory);
    multiply(z->N, D, D, y, up(D), map[OUT], 0, 1, x, up(D));
    norm(z, x, map[NORM2], y);
    multiply(z->N, 2 * z->F, D, y, up(D), map[UP], 0, 0, wide, inner);
#pragma omp for schedule(static)
    for (long n = 0; n < z->N; n++) gate(z->F, wide + n * inner);
    multiply(z->N, D, z->F, wide, inner, map[DOWN], 0, 1, x, up(D));
}

/* x = norm(x + attention(x)), x = norm(x + ffn(x)). */
static void bert_layer(const SIZES *z, const VIEW *view, const int32_t *starts, const MAP *map, float *x, float *y, float *wide, float *memory) {
    long D = z->D, inner = up(z->F);
    multiply(z->N, 3 * D, D, x, up(D), map[QKV], 0, 0, wide, up(3 * D));
    attend(z, view, starts, wide, y, memory);
    multiply(z->N, D, D, y, up(D), map[OUT], 0, 1, x, up(D));
    norm(z, x, map[NORM1], x);
    multiply(z->N, z->F, D, x, up(D), map[UP], 1, 0, wide, inner);
    multiply(z->N, D, z->F, wide, inner, map[DOWN], 0, 1, x, up(D));
    norm(z, x, map[NORM2], x);
}

/* out (N, D): hidden states behind L layers and, where it has a weight, a last norm. starts: (S + 1). maps, views: of each layer. Returns 1, 0 where there is
   no memory, and -1 where a number of a token is in none of the rows of its table. */
int forward(long L, const SIZES *z, const int32_t *starts, const EMBEDDING *embedding, const MAP (*maps)[MAPS], const VIEW *const *views, const float *last,
            float *out) {
    long D = z->D, apart = up(D), inner = (1 + z->gated) * z->F, widest = up(inner > 3 * D ? inner : 3 * D);
    if (!known(z, embedding)) return -1;
    float *x = floats((2 * apart + widest) * z->N), *y = x + apart * z->N, *wide = y + apart * z->N;
    if (!x) return 0;
    const MAP last_norm = {last, NULL};
    int failed = 0;
#pragma omp parallel
    {
        float *memory = floats(head_memory(z->longest, D / z->H));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            embed(z, embedding, x);
            for (long l = 0; l < L; l++) (z->gated ? modern_layer : bert_layer)(z, views[l], starts, maps[l], x, y, wide, memory);
            if (last) norm(z, x, last_norm, x);
#pragma omp for schedule(static)
            for (long n = 0; n < z->N; n++) memcpy(out + n * D, x + n * apart, D * sizeof(float));
        }
        free(memory);
    }
    free(x);
    return !failed;
}

/* out (N, M) = x W + bias. x: (N, K). Returns 0 where there is no memory. */
int linear(long N, long M, long K, const float *x, const float *weight, const float *bias, float *out) {
    MAP map = {weight, bias};
    if (!N) return 1;
    float *rows = M == up(M) ? out : floats(N * up(M));
    if (!rows) return 0;
#pragma omp parallel
    multiply(N, M, K, x, K, map, 0, 0, rows, up(M));
    if (rows != out) {
        for (long n = 0; n < N; n++) memcpy(out + n * M, rows + n * up(M), M * sizeof(float));
        free(rows);
    }
    return 1;
}
