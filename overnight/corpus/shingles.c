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

#define FOLDED 0x20000

// The character at *p as it is within a word, 0 if it separates words; *p moves behind it. `folded` has the characters below FOLDED.
static inline uint32_t next(const uint8_t **p, const uint8_t *end, const uint32_t *folded) {
    uint32_t c = *(*p)++;
    if (c < 0x80) return folded[c];
    int more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
    c &= 0x3f >> more;
    while (more-- && *p < end) c = c << 6 | (*(*p)++ & 0x3f);
    return c < FOLDED ? folded[c] : c;
}

// Whether a character is a word of its own.
static inline int alone(uint32_t c) { return (c >= 0x3000 && c < 0xa000) || (c >= 0x20000 && c < 0x40000); }

// n-gram hashes of documents text[offsets[d]:offsets[d+1]] to out, and where those of each document end; returns how many there are.
// `words` and `ring` have room for n values. A document of 1 to n-1 words has one hash, of all of them, where `whole_short` is set.
long ngrams(const uint8_t *text, const int64_t *offsets, long documents, long n, int whole_short, const uint32_t *folded,
            uint64_t character_base, uint64_t word_base, uint64_t *ring, uint64_t *out, int64_t *ends) {
    uint64_t oldest = 1;  // word_base to the power of n
    for (long i = 0; i < n; i++) oldest *= word_base;
    long total = 0;
    for (long d = 0; d < documents; d++) {
        const uint8_t *p = text + offsets[d], *end = text + offsets[d + 1];
        uint64_t rolling = 0;
        long count = 0, slot = 0;
        while (p < end) {
            uint32_t c = next(&p, end, folded);
            if (!c) continue;
            uint64_t hash = c + 1;
            if (!alone(c))
                for (const uint8_t *q = p; q < end && (c = next(&q, end, folded)) && !alone(c); p = q) hash = hash * character_base + c + 1;
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
