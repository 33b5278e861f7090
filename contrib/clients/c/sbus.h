/* A client of the message bus sbus, to be copied: this file is all of it.
 *
 *     struct sbus bus;
 *     struct sbus_message *message;
 *
 *     if (sbus_connect(&bus, NULL) < 0 || sbus_subscribe(&bus, "a/") < 0)
 *         err(1, "sbus");
 *     while ((message = sbus_receive(&bus, -1)) != NULL) {
 *         printf("%s: %s\n", message->key, message->payload);
 *         free(message);
 *     }
 *     close(bus.fd);
 *
 * A call that fails returns -1 or NULL, and sets errno: ENOTCONN if the bus
 * has closed, EMSGSIZE if a packet is too large, ETIMEDOUT if nothing came in
 * so many milliseconds; -1 of these are for ever.  The caller frees messages.
 * Keys are strings; only one thread at a time may use a bus. */
#pragma once

#include <errno.h>
#include <poll.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SBUS_PACKET_MAX 409600
#define SBUS_WHOAMI "CMSG !/cred/whoami"
#define SBUS_ABSTRACT "/dev/unix/abstract/"

struct sbus_message {
    struct sbus_message *next;  /* kept behind this one */
    int is_control;             /* the server itself has sent it */
    int is_failure;             /* of a request: the payload says why */
    const char *key, *payload;  /* a NUL byte follows each */
    size_t size;                /* of the payload */
    char bytes[];
};

struct sbus {
    int fd;
    struct sbus_message *kept;  /* what came before an answer [CLIENT-8] */
    char reply_keys[512];       /* the answers to all requests begin so */
    unsigned long requests;     /* how many there were */
};

/* Whether a text begins so; no text does if *start* is empty. */
static inline int sbus_begins(const char *text, const char *start) {
    return *start && strncmp(text, start, strlen(start)) == 0;
}

/* ---- Where the bus is [ADDR-1] */

/* Write where a bus is in a directory; return whether the directory is this
 * user's, and its mode has none of these bits. */
static inline int sbus_is_in(char *room, const char *directory, mode_t bits) {
    struct stat status;

    snprintf(room, 256, "%s/sbus.socket", directory);
    return lstat(directory, &status) == 0 && S_ISDIR(status.st_mode) &&
           status.st_uid == getuid() && (status.st_mode & bits) == 0;
}

/* Return the default address; a directory's is written to *room*. */
static inline const char *sbus_default_address(char *room) {
    const char *given = getenv("SBUS_ADDRESS");
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char directory[200];

    if (given && *given)
        return given;
    if (getuid() == 0)
        return "/run/sbus.socket";

    /* A '/' at the end has lstat follow a link */
    snprintf(directory, sizeof directory, "%s/", runtime ? runtime : "");
    if (runtime && *runtime == '/' && sbus_is_in(room, directory, 0022))
        return room;
    snprintf(directory, sizeof directory, "/run/user/%u/", getuid());
    if (sbus_is_in(room, directory, 0022))
        return room;
    /* Anybody could have made this one, and so it must be no link */
    snprintf(directory, sizeof directory, "/tmp/sbus-%u", getuid());
    return sbus_is_in(room, directory, 0077) ? room : "";
}

/* Connect to an address, or to the default one if it is NULL. */
static inline int sbus_connect(struct sbus *bus, const char *address) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int buffer_size = SBUS_PACKET_MAX / 2 + 32;  /* the kernel doubles it */
    char room[256];

    if (address == NULL)
        address = sbus_default_address(room);
    if (sbus_begins(address, SBUS_ABSTRACT)) {
        /* The bytes that the digits leave out stay NUL, up to 108 [ADDR-4] */
        const char *digits = address + strlen(SBUS_ABSTRACT);
        for (int i = 0; i < 108 && strlen(digits) > 1; i++, digits += 2)
            sscanf(digits, "%2hhx", (unsigned char *)name.sun_path + i);
    } else if (*address && strlen(address) < sizeof name.sun_path) {
        strcpy(name.sun_path, address);
    } else {
        return errno = EINVAL, -1;
    }

    memset(bus, 0, sizeof *bus);
    bus->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    setsockopt(bus->fd, SOL_SOCKET, SO_SNDBUF, &buffer_size, sizeof(int));
    if (connect(bus->fd, (struct sockaddr *)&name, sizeof name) == 0)
        return 0;
    close(bus->fd);  /* which leaves errno as it is */
    return -1;
}

/* ---- What is sent */

/* Send a packet by one call, which waits while the bus is busy [CLIENT-3].
 * A key without payload has no NUL byte behind it.  *start* is the key for an
 * answer, or NULL. */
static inline int sbus_send(struct sbus *bus, const char *kind,
                            const char *key, const char *start,
                            const void *payload, size_t size) {
    struct iovec parts[] = {{(char *)kind, strlen(kind)},
                            {(char *)key, strlen(key) + (payload != NULL)},
                            {(char *)start, start ? strlen(start) + 1 : 0},
                            {(void *)payload, size}};
    struct msghdr packet = {.msg_iov = parts, .msg_iovlen = 4};

    for (int i = 0; i < 3; i++)
        size += parts[i].iov_len;
    if (size > SBUS_PACKET_MAX)
        return errno = EMSGSIZE, -1;
    while (sendmsg(bus->fd, &packet, MSG_NOSIGNAL) < 0) {
        if (errno == EPIPE || errno == ECONNRESET)
            errno = ENOTCONN;  /* there may be more to receive [CLIENT-6] */
        if (errno != EINTR)
            return -1;
    }
    return 0;
}

static inline int sbus_subscribe(struct sbus *bus, const char *pattern) {
    return sbus_send(bus, "SUB ", pattern, NULL, NULL, 0);
}

static inline int sbus_unsubscribe(struct sbus *bus, const char *pattern) {
    return sbus_send(bus, "UNSUB ", pattern, NULL, NULL, 0);
}

static inline int sbus_publish(struct sbus *bus, const char *key,
                               const void *payload, size_t size) {
    return sbus_send(bus, "MSG ", key, NULL, payload ? payload : "", size);
}

/* ---- What is received */

/* Return the time in so many milliseconds, or -1 for never. */
static inline long long sbus_time(int ms) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return ms < 0 ? -1 : now.tv_sec * 1000LL + now.tv_nsec / 1000000 + ms;
}

/* Return the next packet of the socket as a message; wait until a time. */
static inline struct sbus_message *sbus_read(struct sbus *bus, long long end) {
    struct pollfd ready = {.fd = bus->fd, .events = POLLIN};
    struct sbus_message *message;
    ssize_t size;

    do {
        long long left = end - sbus_time(0);

        if (poll(&ready, 1, end < 0 ? -1 : left > 0 ? (int)left : 0) == 0)
            return errno = ETIMEDOUT, NULL;
        size = recv(bus->fd, NULL, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
        /* A reset comes once, before the last packets [CLIENT-6] */
    } while (size < 0 && (errno == EAGAIN || errno == ECONNRESET));

    if (size == 0)
        errno = ENOTCONN;
    message = size > 0 ? calloc(1, sizeof *message + size + 1) : NULL;
    if (message == NULL)
        return NULL;
    recv(bus->fd, message->bytes, size, 0);  /* whole [CLIENT-5] */
    message->is_control = message->bytes[0] == 'C';
    message->key = strchr(message->bytes, ' ') + 1;
    message->payload = message->key + strlen(message->key) + 1;
    message->size = message->bytes + size - message->payload;
    return message;
}

/* Return the message that begins with *head*, perhaps with /failed behind it,
 * and keep those that come before [CLIENT-8].  An empty head is any message's.
 * Answers that nobody waits for any more are dropped. */
static inline struct sbus_message *
sbus_await(struct sbus *bus, const char *head, long long end) {
    struct sbus_message *message, **last;

    while ((message = sbus_read(bus, end)) != NULL) {
        int is_same = sbus_begins(message->bytes, head);
        const char *rest = message->bytes + (is_same ? strlen(head) : 0);

        int is_old = sbus_begins(message->key, bus->reply_keys);

        message->is_failure = is_same && strcmp(rest, "/failed") == 0;
        if (*rest == '\0' || message->is_failure || (!*head && !is_old))
            return message;
        for (last = &bus->kept; *last; last = &(*last)->next) {}
        if (is_old)
            free(message);
        else
            *last = message;
    }
    return NULL;
}

/* Return the next message; wait for so many milliseconds. */
static inline struct sbus_message *sbus_receive(struct sbus *bus, int ms) {
    struct sbus_message *message = bus->kept;

    if (message == NULL)
        return sbus_await(bus, "", sbus_time(ms));
    bus->kept = message->next;
    return message;
}

/* Ask who this client is; the payload says it.  When the answer comes, the
 * server has done all that was sent before [PKT-5]. */
static inline struct sbus_message *sbus_whoami(struct sbus *bus, int ms) {
    /* If the bus has closed, what it sent before is still to be kept */
    sbus_send(bus, SBUS_WHOAMI, "", NULL, NULL, 0);
    return sbus_await(bus, SBUS_WHOAMI, sbus_time(ms));
}

/* ---- Requests, of which the server knows nothing */

/* Ask the clients that have subscribed to a key; return the first answer. */
static inline struct sbus_message *
sbus_request(struct sbus *bus, const char *key, const void *question,
             size_t size, int ms) {
    long long end = sbus_time(ms);
    struct sbus_message *self;
    unsigned long long random[2];
    char head[600];

    if (*bus->reply_keys == '\0') {  /* which nobody is to guess */
        self = sbus_whoami(bus, ms);
        if (self == NULL || getrandom(random, sizeof random, 0) < 0)
            return NULL;
        snprintf(bus->reply_keys, sizeof bus->reply_keys, "%s/%016llx%016llx/",
                 self->payload, random[0], random[1]);
        free(self);
        if (sbus_subscribe(bus, bus->reply_keys) < 0)
            return NULL;
    }
    snprintf(head, sizeof head, "MSG %s%lu", bus->reply_keys, ++bus->requests);
    if (sbus_send(bus, "MSG ", key, head + strlen("MSG "),
                  question ? question : "", size) < 0)
        return NULL;
    return sbus_await(bus, head, end);
}

/* Answer a message whose payload is a key for the answer, NUL, a question. */
static inline int sbus_reply(struct sbus *bus, struct sbus_message *asked,
                             const void *payload, size_t size) {
    size_t size_max = asked->size < 4000 ? asked->size : 4000;
    regex_t form;

    /* Any server accepts such a key, if it is short.  A segment ! elsewhere
     * would have it disconnect this client [REQUEST-3]. */
    regcomp(&form, "^(!/cred/[0-9]+/[0-9]+/[0-9]+/){1,12}"
            "[0-9A-Za-z]+/[0-9A-Za-z]+$", REG_EXTENDED | REG_NOSUB);
    int is_request = memchr(asked->payload, '\0', size_max) &&
                     regexec(&form, asked->payload, 0, NULL, 0) == 0;
    regfree(&form);
    errno = EINVAL;
    return is_request ? sbus_publish(bus, asked->payload, payload, size) : -1;
}
