// A pseudo-random permutation, value by value that of order.py, which says what is computed. Some walks are long: in numpy each further round takes as long for
// the few values that are left as for a thousand.
#include <stdint.h>

static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Replaces each of n values below count by where it is sent; `half` is the bits of one side of the network.
void order(uint64_t *values, int64_t n, uint64_t count, uint64_t half, const uint64_t *round_keys, int64_t rounds) {
    uint64_t mask = ((uint64_t)1 << half) - 1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t value = values[i];
        do {
            uint64_t left = value >> half, right = value & mask;
            for (int64_t round = 0; round < rounds; round++) {
                uint64_t next = left ^ (mix(right ^ round_keys[round]) & mask);
                left = right;
                right = next;
            }
            value = left << half | right;
        } while (value >= count);
        values[i] = value;
    }
}
