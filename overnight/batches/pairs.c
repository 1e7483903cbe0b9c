// Plans of pairs and segments, draw by draw those of pairs.py, which says what is computed: with Python's generator, the Mersenne Twister MT19937
// (Matsumoto and Nishimura 1998), and its ways to make numbers of it.
#include <stdint.h>

#define N 624
#define M 397

typedef struct {
    uint32_t words[N];
    uint32_t next;  // as Random.getstate() has it: N where all words are used up
} Generator;

static uint32_t word(Generator *g) {
    if (g->next >= N) {
        for (int i = 0; i < N; i++) {
            uint32_t y = (g->words[i] & 0x80000000u) | (g->words[(i + 1) % N] & 0x7fffffffu);
            g->words[i] = g->words[(i + M) % N] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        g->next = 0;
    }
    uint32_t y = g->words[g->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// Random.random(): 53 bits.
static double draw(Generator *g) {
    uint32_t a = word(g) >> 5, b = word(g) >> 6;
    return (a * 67108864.0 + b) * (1.0 / 9007199254740992.0);
}

static int64_t below(Generator *g, int64_t count) { return (int64_t)(draw(g) * (double)count); }

// Random.getrandbits(bits).bit_count().
static int64_t ones(Generator *g, int64_t bits) {
    int64_t found = 0;
    for (; bits > 0; bits -= 32) found += __builtin_popcount(bits < 32 ? word(g) >> (32 - bits) : word(g));
    return found;
}

// First i in [low, high) with starts[i] >= value, else high.
static int64_t first_from(const int64_t *starts, int64_t value, int64_t low, int64_t high) {
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (starts[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t positive(int64_t a) { return a > 0 ? a : 0; }

static void truncate_segment(Generator *g, int64_t *start, int64_t *end, int64_t cut) {
    int64_t front = ones(g, cut);
    *start += front;
    *end -= cut - front;
}

// Pairs of a shard to out, which has room for a row of 5 for each sentence; returns how many.
int64_t pairs(uint32_t *state, const int64_t *starts, const int64_t *documents, int64_t count, int64_t budget, double short_share, int32_t *out) {
    Generator *g = (Generator *)state;
    int32_t *row = out;
    for (int64_t document = 0; document < count; document++) {
        int64_t sentence = documents[document], end = documents[document + 1];
        while (sentence < end) {
            int64_t target = draw(g) < short_share ? 2 + below(g, budget - 1) : budget;
            int64_t stop = first_from(starts, starts[sentence] + target, sentence + 1, end);
            int64_t split = sentence + (stop - sentence > 1 ? 1 + below(g, stop - sentence - 1) : 1);
            int64_t a_start = starts[sentence], a_end = starts[split], b_start, b_end;
            int is_random = stop - sentence == 1 || draw(g) < 0.5;
            if (is_random) {
                int64_t other = below(g, count - 1);
                other = least(other + (other >= document), count - 1);
                int64_t first = documents[other] + below(g, documents[other + 1] - documents[other]);
                int64_t wanted = target - (a_end - a_start);
                int64_t last = first_from(starts, starts[first] + (wanted > 1 ? wanted : 1), first + 1, documents[other + 1]);
                b_start = starts[first], b_end = starts[last], sentence = split;
            } else {
                b_start = a_end, b_end = starts[stop], sentence = stop;
            }
            int64_t gap = (a_end - a_start) - (b_end - b_start), excess = (a_end - a_start) + (b_end - b_start) - budget;
            if (excess > 0) {
                int64_t from_a = gap > 0 ? least(excess, gap) + positive(excess - gap) / 2 : positive(excess + gap) / 2;
                truncate_segment(g, &a_start, &a_end, from_a);
                truncate_segment(g, &b_start, &b_end, excess - from_a);
            }
            row[0] = (int32_t)a_start, row[1] = (int32_t)a_end, row[2] = (int32_t)b_start, row[3] = (int32_t)b_end, row[4] = is_random;
            row += 5;
        }
    }
    return (row - out) / 5;
}

// Segments of a shard to out, which has the room that pairs.py computes; returns how many. With `whole` each has as many whole sentences as its target holds,
// one at least, of which only those are cut that are longer than the budget.
int64_t segments(uint32_t *state, const int64_t *starts, const int64_t *documents, int64_t count, int64_t budget, double short_share, int whole, int32_t *out) {
    Generator *g = (Generator *)state;
    int32_t *row = out;
    for (int64_t document = 0; document < count; document++) {
        int64_t sentence = documents[document], end = starts[documents[document + 1]];
        for (int64_t start = starts[sentence]; start < end; row += 5) {
            int64_t target = draw(g) < short_share ? 2 + below(g, budget - 1) : budget;
            int64_t stop = least(start + target, end);
            if (whole) {
                while (starts[sentence] <= start) sentence++;
                stop = least(starts[sentence], start + budget);
                while (starts[sentence] < end && starts[sentence + 1] - start <= target) stop = starts[++sentence];
            }
            row[0] = (int32_t)start, row[1] = row[2] = row[3] = (int32_t)stop, row[4] = 0;
            start = stop;
        }
    }
    return (row - out) / 5;
}
