/* Products of fp32 by panels: VW·NV columns of the right operand side by side, row after row, the last panel as narrow as whole vectors allow; what is
   beyond the matrix is 0. The source asks for fused multiply-adds (fp-contract). Includes attention.h before it, for least. */

#include <string.h>

/* Floats of a vector, vectors of a panel, rows of a tile: MR·NV sums fit the registers. */
#ifdef __AVX512F__
enum { VW = 16, NV = 4, MR = 6 };
#else
enum { VW = 8, NV = 2, MR = 6 };
#endif
enum { NR = VW * NV, LINE = 16 };
typedef float VEC __attribute__((vector_size(VW * sizeof(float)), aligned(4), may_alias));

static inline long up(long n) { return (n + VW - 1) / VW * VW; }

/* C (rows × vectors·VW) = or += A B, all sums in registers. Where `next` is not NULL as many lines of the cache from there are asked for as B has rows. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, long K, const float *A, long a_row, long a_col, const float *B,
                                                       float *C, long ldc, int add, const float *next) {
    VEC sum[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[m][v] = add ? *(const VEC *)(C + m * ldc + v * VW) : (VEC){0};
    for (long k = 0; k < K; k++, A += a_col, B += vectors * VW) {
        if (next) __builtin_prefetch(next + k * LINE, 0, 2);
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

/* The same for any number of rows: A[m, k] is at m·a_row + k·a_col. */
static inline __attribute__((always_inline)) void strip(const int vectors, long M, long K, const float *A, long a_row, long a_col, const float *B, float *C,
                                                        long ldc, int add, const float *next) {
    long m = 0, ahead = next ? K * LINE : 0;
    for (; m + MR <= M; m += MR, next += ahead) tile(MR, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add, next);
    for (; m + 2 <= M; m += 2, next += ahead) tile(2, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add, next);
    for (; m < M; m++, next += ahead) tile(1, vectors, K, A + m * a_row, a_row, a_col, B, C + m * ldc, ldc, add, next);
}

/* The same for the panel of the first of so many columns that are left. */
static inline __attribute__((always_inline)) void panel(long M, long columns, long K, const float *A, long a_row, long a_col, const float *B, float *C, long ldc,
                                                        int add, const float *next) {
    long vectors = least(NR, columns) / VW;
    if (vectors == NV)
        strip(NV, M, K, A, a_row, a_col, B, C, ldc, add, next);
    else if (vectors == 1)
        strip(1, M, K, A, a_row, a_col, B, C, ldc, add, next);
    else if (vectors == 2)
        strip(NV < 2 ? NV : 2, M, K, A, a_row, a_col, B, C, ldc, add, next);
    else
        strip(NV < 3 ? NV : 3, M, K, A, a_row, a_col, B, C, ldc, add, next);
}

/* C (M, N) = or += A B. A[m, k] is at m·a_row + k·a_col. B: panels, `step` floats apart, of which rows `first` to first + K are used. N: whole vectors. */
static void product(long M, long N, long K, const float *A, long a_row, long a_col, const float *B, long step, long first, float *C, long ldc, int add) {
    for (long n = 0; n < N; n += NR, B += step)
        panel(M, N - n, K, A, a_row, a_col, B + first * least(NR, N - n), C + n, ldc, add, NULL);
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
