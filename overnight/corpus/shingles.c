// Hashes of the word n-grams of documents, and their sketches by one-permutation hashing. shingles.py has the same in numpy and says what is computed.
#include <stdint.h>
#include <string.h>

#define BINS 256
#define EMPTY UINT32_MAX

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Bytes of the character at p if it separates words, else 0; `whole` is set for a character that is a word of its own.
static long separator(const uint8_t *p, const uint8_t *end, const uint8_t *letter, int *whole) {
    *whole = 0;
    if (*p < 0x80) return !letter[*p];
    if (*p == 0xc2 && p + 1 < end) return 2;
    if (*p < 0xe2 || *p > 0xe9 || p + 2 >= end) return 0;
    if (*p <= 0xe3 && p[1] == 0x80) return 3;
    *whole = *p >= 0xe3;
    return 0;
}

// n-gram hashes of documents text[offsets[d]:offsets[d+1]] to out, and where those of each document end; returns how many there are.
// `words` and `ring` have room for n values. A document of 1 to n-1 words has one hash, of all of them, where `whole_short` is set.
long ngrams(const uint8_t *text, const int64_t *offsets, long documents, long n, int whole_short, const uint8_t *letter, uint64_t byte_base,
            uint64_t word_base, uint64_t *ring, uint64_t *out, int64_t *ends) {
    uint64_t oldest = 1;  // word_base to the power of n
    for (long i = 0; i < n; i++) oldest *= word_base;
    long total = 0;
    for (long d = 0; d < documents; d++) {
        const uint8_t *p = text + offsets[d], *end = text + offsets[d + 1];
        uint64_t rolling = 0;
        long count = 0, slot = 0;
        while (p < end) {
            int whole;
            long skip = separator(p, end, letter, &whole);
            if (skip) {
                p += skip;
                continue;
            }
            uint64_t hash = 0;
            if (whole) {
                for (int i = 0; i < 3; i++) hash = hash * byte_base + *p++ + 1;
            } else {
                do hash = hash * byte_base + letter[*p++] + 1;
                while (p < end && !separator(p, end, letter, &whole) && !whole);
            }
            uint64_t word = mixed(hash);
            rolling = rolling * word_base + word;
            if (count >= n) rolling -= ring[slot] * oldest;
            ring[slot] = word;
            slot = slot + 1 == n ? 0 : slot + 1;
            if (++count >= n) out[total++] = mixed(rolling);
        }
        if (whole_short && count && count < n) out[total++] = mixed(rolling);
        ends[d] = total;
    }
    return total;
}

// Sketches of documents whose n-gram hashes are hashes[ends[d-1]:ends[d]]: the smallest value in each bin, 16 bits of it to `sketch`
// (documents, BINS), and the keys of `bands` bands of `rows` bins, the empty ones filled, to `keys` (documents, bands).
void sketches(const uint64_t *hashes, const int64_t *ends, long documents, const uint8_t *steps, long bands, long rows, uint16_t *sketch,
              uint64_t *keys) {
    uint32_t least[BINS], filled[BINS];
    uint8_t full[BINS];
    for (long d = 0; d < documents; d++) {
        memset(least, 0xff, sizeof least);
        for (int64_t i = d ? ends[d - 1] : 0; i < ends[d]; i++) {
            uint32_t value = (uint32_t)(hashes[i] >> 16) & ~(uint32_t)1;  // even, so never EMPTY
            uint32_t *bin = least + (hashes[i] >> 56);
            if (value < *bin) *bin = value;
        }
        long count = 0;
        for (int j = 0; j < BINS; j++) {
            sketch[d * BINS + j] = least[j] == EMPTY ? 0xffff : (uint16_t)least[j];
            if (least[j] != EMPTY) full[count++] = (uint8_t)j;
        }
        memcpy(filled, least, sizeof least);
        long missing = count ? BINS - count : 0;
        for (int t = 0; missing; t++)
            for (long k = 0; k < count; k++) {
                uint32_t *bin = filled + (full[k] ^ steps[t]);
                missing -= *bin == EMPTY;
                *bin = *bin == EMPTY ? least[full[k]] : *bin;
            }
        for (long b = 0; b < bands; b++) {
            uint64_t key = (uint64_t)b;
            for (long r = 0; r < rows; r++) key = mixed(key ^ filled[b * rows + r]) + (uint64_t)r;
            keys[d * bands + b] = key;
        }
    }
}
