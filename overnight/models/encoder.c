/* What an encoder computes between its matrix products, forward and backward; attention is attention.c. Compiled by encoder_native.py.

   STORE: type of activations; 16 bits for bf16. The arithmetic is in fp32. A row is computed by one thread, so the result does not depend on how
   many there are. Shapes: N tokens of the flat batch, F width inside the feed-forward part, M predicted positions, V vocabulary. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define ROWS _Pragma("omp parallel for schedule(static)")

/* Numbers that one thread computes together, where there are no rows. */
#define STRETCH 4096

#include "activations.h"
#include "transpose.h"

/* out = x kept · scale, one after the other. kept: 0 or 1 for each of n numbers. */
void dropout(long n, float scale, const uint8_t *kept, const STORE *x, STORE *out) {
    ROWS for (long at = 0; at < n; at += STRETCH) {
        long end = at + STRETCH < n ? at + STRETCH : n;
#pragma omp simd
        for (long j = at; j < end; j++) out[j] = store(load(x[j]) * (float)kept[j] * scale);
    }
}

/* q = x / scale, rounded, where the scale of a row is its largest magnitude / 127. x, q: (N, K). scales: (N). */
void quantize(long N, long K, const STORE *x, int8_t *q, float *scales) {
    ROWS for (long n = 0; n < N; n++) {
        const STORE *restrict row = x + n * K;
        int8_t *restrict out = q + n * K;
        float most = 0;
#pragma omp simd reduction(max : most)
        for (long j = 0; j < K; j++) {
            float size = fabsf(load(row[j]));
            most = size > most ? size : most;
        }
        float inverse = most > 0 ? 127.0f / most : 0;
        scales[n] = most / 127.0f;
#pragma omp simd
        for (long j = 0; j < K; j++) out[j] = (int8_t)(int32_t)rintf(load(row[j]) * inverse);
    }
}

/* out = sums · scale of the row · scale of the column + bias. sums, out: (N, M). rows: (N). columns, bias: (M). */
void dequantize(long N, long M, const int32_t *sums, const float *rows, const float *columns, const float *bias, STORE *out) {
    ROWS for (long n = 0; n < N; n++) {
        const int32_t *restrict s = sums + n * M;
        STORE *restrict o = out + n * M;
        float scale = rows[n];
#pragma omp simd
        for (long j = 0; j < M; j++) o[j] = store((float)s[j] * (scale * columns[j]) + bias[j]);
    }
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

/* losses[m] = cross-entropy of row m of the logits; x becomes its gradient, softmax(x) less 1 at the label. A row with a negative label has neither. */
void cross_entropy(long M, long V, const int64_t *labels, STORE *x, float *losses) {
    ROWS for (long m = 0; m < M; m++) {
        STORE *restrict row = x + m * V;
        float top = -INFINITY, sum = 0;
        if (labels[m] < 0) {
            losses[m] = 0;
            memset(row, 0, V * sizeof(STORE));
            continue;
        }
#pragma omp simd reduction(max : top)
        for (long j = 0; j < V; j++) top = load(row[j]) > top ? load(row[j]) : top;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < V; j++) sum += exp_(load(row[j]) - top);
        float at_label = load(row[labels[m]]) - top, inverse = 1.0f / sum;
        losses[m] = logf(sum) - at_label;
#pragma omp simd
        for (long j = 0; j < V; j++) row[j] = store(exp_(load(row[j]) - top) * inverse);
        row[labels[m]] = store(exp_(at_label) * inverse - 1.0f);
    }
}

/* out = the transpose of x. x: (N, K), out: (K, N), of 32 bits. */
void transpose(long N, long K, const uint32_t *x, uint32_t *out) {
    long whole = K / 16 * 16;
    ROWS for (long n = 0; n < N; n += 16) {
        long rows = n + 16 < N ? 16 : N - n, columns = rows == 16 ? whole : 0;
        transposed(rows == 16 ? 16 : 0, columns, x + n * K, K, out + n, N);
        transposed_words(rows, K - columns, x + n * K + columns, K, out + columns * N + n, N);
    }
}
