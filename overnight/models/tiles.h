/* Products of bf16 by AMX, which multiplies tiles of 16 × 32 and 32 × 16 in 16 cycles, sums in fp32; plain loops where PORTABLE is defined. Includes activations.h
   before it, with BF16. The source defines _DEFAULT_SOURCE, for syscall. The right operand is words of two bf16: two rows interleaved to one, the earlier in
   the low half. */

#include <stdint.h>
#include <string.h>

#include "transpose.h"

static inline long up(long n) { return (n + 31) / 32 * 32; }

/* prepare: whether this can be used here.
   take_tiles, give_tiles: around what a thread multiplies. All eight tiles are 16 rows of 64 bytes. What another library has set is put back, since it may
   remember that it has.
   product: C (M, N) = or += A B. A: (M, K) rows of bf16. B: (K / 2, N) words. M, N, K: multiples of 32. */
typedef struct { uint8_t bytes[64]; } TILES;

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__) && !defined(PORTABLE)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives a process the memory that tiles need only once it has asked. */
int prepare(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}

static inline TILES take_tiles(void) {
    TILES before, ours = {{1}};
    for (int i = 0; i < 8; i++) ours.bytes[16 + 2 * i] = 64, ours.bytes[48 + i] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
    return before;
}

static inline void give_tiles(TILES before) { _tile_loadconfig(&before); }

static void product(long M, long N, long K, const STORE *A, long lda, const uint32_t *B, long ldb, float *C, long ldc, int add) {
    for (long n = 0; n < N; n += 32)
        for (long m = 0; m < M; m += 32) {
            float *c = C + m * ldc + n;
            if (add) {
                _tile_loadd(0, c, ldc * 4);
                _tile_loadd(1, c + 16, ldc * 4);
                _tile_loadd(2, c + 16 * ldc, ldc * 4);
                _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (long k = 0; k < K; k += 32) {
                const STORE *a = A + m * lda + k;
                const uint32_t *b = B + k / 2 * ldb + n;
                _tile_loadd(4, a, lda * 2);
                _tile_loadd(6, b, ldb * 4);
                _tile_loadd(7, b + 16, ldb * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, a + 16 * lda, lda * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, c, ldc * 4);
            _tile_stored(1, c + 16, ldc * 4);
            _tile_stored(2, c + 16 * ldc, ldc * 4);
            _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
        }
}

#else

/* Plain loops, for tests on other processors. */
int prepare(void) {
#ifdef PORTABLE
    return 1;
#else
    return 0;
#endif
}

static inline TILES take_tiles(void) { return (TILES){{0}}; }

static inline void give_tiles(TILES before) { (void)before; }

static void product(long M, long N, long K, const STORE *A, long lda, const uint32_t *B, long ldb, float *C, long ldc, int add) {
    for (long m = 0; m < M; m++)
        for (long n = 0; n < N; n++) {
            float sum = add ? C[m * ldc + n] : 0;
            for (long k = 0; k < K; k += 2) {
                uint32_t pair = B[k / 2 * ldb + n];
                sum += load(A[m * lda + k]) * load((STORE)pair) + load(A[m * lda + k + 1]) * load((STORE)(pair >> 16));
            }
            C[m * ldc + n] = sum;
        }
}

#endif

/* (rows / 2, wide) words of (rows, wide) bf16, `stride` apart. rows: even. */
ROW void interleave(long rows, long wide, const STORE *from, long stride, uint32_t *to) {
    for (long r = 0; r < rows; r += 2, from += 2 * stride, to += wide) {
        const STORE *restrict low = from, *restrict high = from + stride;
        uint32_t *restrict out = to;
#pragma omp simd
        for (long e = 0; e < wide; e++) out[e] = (uint32_t)low[e] | (uint32_t)high[e] << 16;
    }
}
