// The distinct words of a text, and which of them each place is. words.py has the same with pyarrow.
#include <stdint.h>
#include <string.h>

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Words of text[0:size] between bytes of kind 1; where a byte is of kind 2, it is a word of its own. `places` gets the number of each word, `starts` and
// `ends` where those that are new are, and `*count` how many places there are. `table` is zeros, `slots` of them, a power of two. Returns how many words
// differ, or -1 when they would fill more than half of the table.
long distinct(const uint8_t *text, long size, const uint8_t *kind, uint32_t *table, long slots, int32_t *places, int64_t *starts, int64_t *ends,
              long *count) {
    long found = 0, total = 0, at = 0;
    while (at < size) {
        if (kind[text[at]] == 1) {
            at++;
            continue;
        }
        long start = at;
        uint64_t hash = 0;
        if (kind[text[at]] == 2) {
            hash = text[at++];
        } else {
            do hash = hash * 0x9e3779b97f4a7c15u + text[at++] + 1;
            while (at < size && !kind[text[at]]);
        }
        long length = at - start, slot = (long)(mixed(hash) & (uint64_t)(slots - 1));
        for (;; slot = (slot + 1) & (slots - 1)) {
            uint32_t number = table[slot];
            if (!number) {
                if (2 * (found + 1) > slots) return -1;
                starts[found] = start;
                ends[found] = at;
                table[slot] = (uint32_t)++found;
                places[total++] = (int32_t)(found - 1);
                break;
            }
            number--;
            if (ends[number] - starts[number] == length && !memcmp(text + starts[number], text + start, (size_t)length)) {
                places[total++] = (int32_t)number;
                break;
            }
        }
    }
    *count = total;
    return found;
}
