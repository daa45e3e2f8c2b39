/* Counts of values over the whole range of 64 bits, in buckets that are 1.6 % wide. */

#include <stdint.h>
#include <stdio.h>

enum { SUB_BITS = 6, BUCKETS = (64 - SUB_BITS + 1) << SUB_BITS };

struct histogram {
    uint64_t count[BUCKETS];
};

static void count_in(struct histogram *h, uint64_t value)
{
    int shift = value < (1u << SUB_BITS) ? 0 : 63 - SUB_BITS - __builtin_clzll(value);
    h->count[((uint64_t)shift << SUB_BITS) + (value >> shift)]++;
}

/* As [[lowest value, count], …] */
static void print_histogram(const char *name, const struct histogram *h)
{
    const char *comma = "";
    printf(",\"%s\":[", name);
    for (unsigned i = 0; i < BUCKETS; i++)
        if (h->count[i]) {
            unsigned shift = i < (2u << SUB_BITS) ? 0 : (i >> SUB_BITS) - 1;
            printf("%s[%llu,%llu]", comma, (unsigned long long)(i - (shift << SUB_BITS)) << shift,
                   (unsigned long long)h->count[i]);
            comma = ",";
        }
    printf("]");
}
