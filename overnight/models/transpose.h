/* The transpose of a matrix of words of 32 bits; plain loops where PORTABLE is defined. */

#include <stdint.h>
#include <string.h>

/* (columns, rows) of words (rows, columns), whose rows are ldt and ldf words apart. */
static void transposed_words(long rows, long columns, const void *from, long ldf, void *to, long ldt) {
    for (long c = 0; c < columns; c++)
        for (long r = 0; r < rows; r++) memcpy((uint32_t *)to + c * ldt + r, (const uint32_t *)from + r * ldf + c, sizeof(uint32_t));
}

/* The same, for multiples of 16. */
#if defined(__AVX512F__) && !defined(PORTABLE)

#include <immintrin.h>

static void transposed(long rows, long columns, const void *from, long ldf, void *to, long ldt) {
    const __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long r = 0; r < rows; r += 16)
        for (long c = 0; c < columns; c += 16) {
            __m512i x[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512((const uint32_t *)from + (r + i) * ldf + c);
            /* Of each pair of rows s apart, the right half of each 2s columns of the first and the left half of the second change places. */
#pragma GCC unroll 4
            for (int s = 1; s < 16; s *= 2) {
                __mmask16 right = _mm512_test_epi32_mask(place, _mm512_set1_epi32(s));
                __m512i first = _mm512_mask_add_epi32(place, right, place, _mm512_set1_epi32(16 - s));
                __m512i second = _mm512_mask_add_epi32(_mm512_add_epi32(place, _mm512_set1_epi32(s)), right, place, _mm512_set1_epi32(16));
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++)
                    if (!(i & s)) {
                        __m512i a = x[i], b = x[i + s];
                        x[i] = _mm512_permutex2var_epi32(a, first, b);
                        x[i + s] = _mm512_permutex2var_epi32(a, second, b);
                    }
            }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_storeu_si512((uint32_t *)to + (c + i) * ldt + r, x[i]);
        }
}

#else

static void transposed(long rows, long columns, const void *from, long ldf, void *to, long ldt) {
    for (long r = 0; r < rows; r += 16) transposed_words(16, columns, (const uint32_t *)from + r * ldf, ldf, (uint32_t *)to + r, ldt);
}

#endif
