/* What is counted, what must hold, and how long the load itself was away. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "histogram.h"
#include "load.h"

enum { TEXT_BYTES = 300 };

struct since since;
struct violations violations;

static struct histogram latency, latency_in_stall, joins;
static uint64_t stall_end_ns;
static char trouble[TEXT_BYTES];

void die(const char *what)
{
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t clock_ns(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t monotonic_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

/* Time that this process was ready to run and did not: the cores were taken. */
static uint64_t runqueue_wait_ns(void)
{
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file) {
        if (fscanf(file, "%llu %llu", &ran, &waited) != 2)
            waited = 0;
        fclose(file);
    }
    return waited;
}

/* Keeps the first text that tells of a violation, made fit for JSON. */
void note(const char *what, const unsigned char *text, size_t bytes)
{
    if (trouble[0])
        return;
    snprintf(trouble, sizeof trouble, "%s: %.*s", what, bytes > 200 ? 200 : (int)bytes, text);
    for (char *c = trouble; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ' || (unsigned char)*c > '~')
            *c = '\'';
}

void not_expected(const unsigned char *what, size_t bytes)
{
    violations.strange++;
    note("not expected", what, bytes);
}

/* A live message of that moment. */
void came(uint64_t sent_ns)
{
    if (!since.first_ns)
        since.first_ns = now_ns;
    since.last_ns = now_ns;
    since.deliveries++;
    count_in(sent_ns < stall_end_ns ? &latency_in_stall : &latency, now_ns > sent_ns ? now_ns - sent_ns : 0);
}

void joined(uint64_t took_ns)
{
    count_in(&joins, took_ns);
}

/* Offsets of a subscription follow each other. */
void follow(uint64_t *last, uint64_t offset, const unsigned char *line, size_t bytes)
{
    if (offset == *last + 1) {
        *last = offset;
    } else if (offset <= *last) {
        violations.duplicates++;
        note("an offset came again", line, bytes);
    } else {
        violations.holes += offset - *last - 1;
        note("offsets are missing", line, bytes);
        *last = offset;
    }
}

/* A loop that was away for longer than its work or its wait explain was stalled. */
void look_for_stall(uint64_t from_ns, uint64_t to_ns, uint64_t allowed_ns)
{
    uint64_t gap_ns = to_ns - from_ns;
    if (gap_ns <= allowed_ns + stall_ns)
        return;
    since.stalls++;
    since.stall_sum_ns += gap_ns;
    since.longest_stall_ns = gap_ns > since.longest_stall_ns ? gap_ns : since.longest_stall_ns;
    stall_end_ns = to_ns;
}

void mark(void)
{
    memset(&since, 0, sizeof since);
    memset(&latency, 0, sizeof latency);
    memset(&latency_in_stall, 0, sizeof latency_in_stall);
    memset(&joins, 0, sizeof joins);
    since.mark_ns = monotonic_ns();
    since.cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    since.waited_ns = runqueue_wait_ns();
}

static void print(const char *name, uint64_t value)
{
    printf(",\"%s\":%llu", name, (unsigned long long)value);
}

void report(void)
{
    uint64_t lowest = UINT64_MAX, highest = 0;
    for (unsigned i = 0; i < count; i++)
        for (unsigned j = 0; j < each; j++) {
            uint64_t offset = *offset_of(&connections[i], j);
            lowest = offset < lowest ? offset : lowest;
            highest = offset > highest ? offset : highest;
        }
    printf("{\"event\":\"report\",\"trouble\":\"%s\"", trouble);
    print("elapsed_ns", monotonic_ns() - since.mark_ns);
    print("deliveries", since.deliveries);
    print("replayed", since.replayed);
    print("bytes", since.bytes);
    print("frames", since.frames);
    print("reads", since.reads);
    print("pings", since.pings);
    print("first_ns", since.first_ns);
    print("last_ns", since.last_ns);
    print("stalls", since.stalls);
    print("longest_stall_ns", since.longest_stall_ns);
    print("stall_sum_ns", since.stall_sum_ns);
    print("cpu_ns", clock_ns(CLOCK_PROCESS_CPUTIME_ID) - since.cpu_ns);
    print("waited_ns", runqueue_wait_ns() - since.waited_ns);
    print("open", open_count);
    print("closed", violations.closed);
    print("errors", violations.errors);
    print("strange", violations.strange);
    print("holes", violations.holes);
    print("duplicates", violations.duplicates);
    print("evicted", violations.evicted);
    print("recovered", violations.recovered);
    print("unrecovered", violations.unrecovered);
    print("lowest", count ? lowest : 0);
    print("highest", highest);
    print_histogram("latency", &latency);
    print_histogram("latency_in_stall", &latency_in_stall);
    print_histogram("joins", &joins);
    printf("}\n");
}
