/* The adapter of sbus.h for the conformance kit; spec/README.md has its form:
 * cc -o adapter adapter.c */
#define _GNU_SOURCE
#include "sbus.h"
#define IS(command) (strcmp(word, command) == 0)

/* Decode the next word of a line in place; return "" if there is none. */
static char *decode(size_t *size) {
    static char none[] = "";
    char pair[3] = "", *word = strtok(NULL, " \n"), *end = word;

    for (char *digits = word; digits && *digits > '-'; digits += 2)
        *end++ = (char)strtol(memcpy(pair, digits, 2), NULL, 16);
    *size = (size_t)(end - word);
    return word ? memset(end, 0, 1), word : none;
}

static void print(const char *word, const char *bytes, size_t size) {
    printf("%s ", word);
    while (size-- > 0)
        printf("%02x", (unsigned char)*bytes++);
}

int main(int count, char **words) {
    struct sbus_message *got = NULL;
    struct sbus bus;
    char *line = NULL;
    size_t room = 0, key_size, size;

    if (count != 2 || sbus_connect(&bus, *words[1] ? words[1] : NULL) < 0)
        return perror("adapter"), 1;
    for (; getline(&line, &room, stdin) > 0; puts(""), fflush(stdout)) {
        char *word = strtok(line, " \n"), *key = decode(&key_size);
        char *text = decode(&size);

        if (IS("receive") && (got = sbus_receive(&bus, -1))) {
            print(got->is_control ? "control" : "message", got->key,
                  strlen(got->key));
            print("", got->payload, got->size);
        } else if (IS("whoami") && (got = sbus_whoami(&bus)))
            print("credentials", got->payload, got->size);
        else if (IS("request") &&
                 (got = sbus_request(&bus, key, text, size, 5000)))
            print(got->is_failure ? "error" : "answer", got->payload,
                  got->size);
        else if (IS("publish") ? sbus_publish(&bus, key, text, size) == 0
                 : IS("reply") ? sbus_reply(&bus, got, key, key_size) == 0
                 : IS("subscribe") ? sbus_subscribe(&bus, key) == 0
                 : IS("unsubscribe") ? sbus_unsubscribe(&bus, key) == 0
                 : IS("close") && shutdown(bus.fd, SHUT_RDWR) == 0)
            printf("ok");
        else
            printf(errno == ENOTCONN ? "closed" : "error %m");
    }
}
