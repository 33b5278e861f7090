/* The adapter of sbus.h for the conformance kit; spec/README.md has its form:
 * cc -o adapter adapter.c */
#include "sbus.h"
#define IS(command) (strcmp(word, command) == 0)

/* Decode the next text of a line in place, and end it with a NUL byte. */
static char *decode(size_t *size) {
    char pair[3] = "", *text = strtok(NULL, " \n"), *end = text;

    for (char *digits = text; *digits > '-'; digits += 2)
        *end++ = (char)strtol(memcpy(pair, digits, 2), NULL, 16);
    *size = (size_t)(end - text);
    return *end = '\0', text;
}

static void print(const char *text, size_t size) {
    for (printf(" "); size-- > 0; text++)
        printf("%02x", (unsigned char)*text);
}

int main(int count, char **words) {
    struct sbus_message *got = NULL;
    struct sbus bus;
    char *line = NULL;
    size_t room = 0, size;

    if (count > 2 || sbus_connect(&bus, words[1]) < 0)
        return perror("adapter"), 1;
    for (; getline(&line, &room, stdin) > 0; puts(""), fflush(stdout)) {
        char *word = strtok(line, " "), *key = decode(&size);
        char *text = decode(&size);

        if (IS("receive") ? (got = sbus_receive(&bus, -1)) != NULL
            : IS("whoami") ? (got = sbus_whoami(&bus, -1)) != NULL
            : IS("request") &&
              (got = sbus_request(&bus, key, text, size, 5000))) {
            printf(got->is_failure   ? "error"
                   : got->is_control ? "control" : "ok");
            print(got->key, strlen(got->key));
            print(got->payload, got->size);
        } else if (IS("publish") ? sbus_publish(&bus, key, text, size) == 0
                   : IS("reply") ? sbus_reply(&bus, got, text, size) == 0
                   : IS("subscribe") ? sbus_subscribe(&bus, key) == 0
                   : IS("unsubscribe") && sbus_unsubscribe(&bus, key) == 0)
            printf("ok");
        else
            printf(errno == ENOTCONN ? "closed" : "error %m");
    }
}
