/* Looking for things in bytes that came. Needs _GNU_SOURCE. */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline const unsigned char *find(const unsigned char *from, const unsigned char *end, const char *text)
{
    return from && from < end ? memmem(from, (size_t)(end - from), text, strlen(text)) : NULL;
}

static inline bool begins(const unsigned char *p, const unsigned char *end, const char *text)
{
    size_t size = strlen(text);
    return (size_t)(end - p) >= size && !memcmp(p, text, size);
}

/* The number that begins at `p`; gives the first byte behind it. */
static inline const unsigned char *number_at(const unsigned char *p, const unsigned char *end, uint64_t *number)
{
    for (*number = 0; p < end && *p >= '0' && *p <= '9'; p++)
        *number = *number * 10 + (*p - '0');
    return p;
}

/* The number after `text`, found at or after `from`; gives the first byte behind it, or NULL. */
static inline const unsigned char *number_after(const unsigned char *from, const unsigned char *end,
                                                const char *text, uint64_t *number)
{
    const unsigned char *p = find(from, end, text);
    return p ? number_at(p + strlen(text), end, number) : NULL;
}
