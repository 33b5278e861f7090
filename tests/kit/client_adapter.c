/* An adapter of a client in C for the kit; spec/README.md has its form.
 *
 *     cc -O2 -o client_adapter client_adapter.c
 *     ./client_adapter ADDRESS
 *
 * It shows how little a client needs: one send, one recv, and a list of what
 * was received before the answer to a question [CLIENT-8]. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#define PACKET_MAX 409600      /* the packet size limit [CLIENT-5] */
#define WHOAMI "CMSG !/cred/whoami"
#define ABSTRACT "/dev/unix/abstract/"

struct packet {
    struct packet *next;
    size_t size;
    char bytes[];
};

static int bus;
static struct packet *kept, **last = &kept;  /* in the order of arrival */

/* Put the bytes of hexadecimal digits in a buffer; return how many. */
static size_t from_hex(const char *digits, char *bytes)
{
    size_t size = 0;
    char pair[3] = "";

    for (; digits[0] && digits[1]; digits += 2) {
        memcpy(pair, digits, 2);
        bytes[size++] = (char)strtol(pair, NULL, 16);
    }
    return size;
}

static void print_hex(const char *bytes, size_t size)
{
    putchar(' ');
    if (size == 0)
        putchar('-');
    for (size_t i = 0; i < size; i++)
        printf("%02x", (unsigned char)bytes[i]);
}

/* Connect to an address, or to where the environment says [ADDR-1]. */
static int connect_to(const char *address)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    socklen_t size = sizeof name;
    char *directory = getenv("XDG_RUNTIME_DIR");

    if (*address == '\0' && getenv("SBUS_ADDRESS"))
        address = getenv("SBUS_ADDRESS");
    if (strncmp(address, ABSTRACT, strlen(ABSTRACT)) == 0)
        from_hex(address + strlen(ABSTRACT), name.sun_path);
    else if (*address)
        snprintf(name.sun_path, sizeof name.sun_path, "%s", address);
    else
        snprintf(name.sun_path, sizeof name.sun_path, "%s/sbus.socket",
                 directory ? directory : "/run");
    bus = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    return connect(bus, (struct sockaddr *)&name, size);
}

/* Send a packet once and whole [CLIENT-3]; return 0, or -1 and errno. */
static int send_packet(const char *bytes, size_t size)
{
    int room = 2 * PACKET_MAX;

    if (size > PACKET_MAX) {
        errno = EMSGSIZE;
        return -1;
    }
    if (send(bus, bytes, size, MSG_NOSIGNAL) >= 0)
        return 0;
    if (errno != EMSGSIZE)
        return -1;
    setsockopt(bus, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    return send(bus, bytes, size, MSG_NOSIGNAL) >= 0 ? 0 : -1;
}

/* Return the next packet from the bus, or NULL at the end [CLIENT-6]. */
static struct packet *receive(void)
{
    static char bytes[2 * PACKET_MAX];  /* so that none is cut */
    ssize_t size = recv(bus, bytes, sizeof bytes, 0);
    struct packet *packet;

    if (size < 0 && errno == ECONNRESET)
        size = recv(bus, bytes, sizeof bytes, 0);
    if (size <= 0)
        return NULL;
    packet = malloc(sizeof *packet + (size_t)size);
    packet->next = NULL;
    packet->size = (size_t)size;
    memcpy(packet->bytes, bytes, (size_t)size);
    return packet;
}

/* Print a packet: its kind, key and payload [CLIENT-2]. */
static void print_packet(const struct packet *packet)
{
    int is_control = packet->bytes[0] == 'C';
    const char *key = packet->bytes + (is_control ? 5 : 4);
    const char *end = packet->bytes + packet->size;
    const char *nul = memchr(key, '\0', (size_t)(end - key));

    printf(is_control ? "control" : "message");
    print_hex(key, (size_t)(nul - key));
    print_hex(nul + 1, (size_t)(end - nul - 1));
    putchar('\n');
}

static void answer_receive(void)
{
    struct packet *packet = kept;

    if (packet) {
        kept = packet->next;
        last = kept ? last : &kept;
    } else
        packet = receive();
    if (packet)
        print_packet(packet);
    else
        puts("closed");
    free(packet);
}

static void answer_whoami(void)
{
    struct packet *packet;

    send_packet(WHOAMI, strlen(WHOAMI));  /* or the end is to be read */
    while ((packet = receive()) != NULL) {
        if (packet->size > sizeof WHOAMI &&
            memcmp(packet->bytes, WHOAMI, sizeof WHOAMI) == 0) {
            printf("credentials");
            print_hex(packet->bytes + sizeof WHOAMI,
                      packet->size - sizeof WHOAMI);
            putchar('\n');
            free(packet);
            return;
        }
        *last = packet;
        last = &packet->next;
    }
    puts("closed");
}

/* Send what a command says: a kind, a text, and perhaps NUL and another. */
static void answer_command(const char *kind, const char *text,
                           const char *payload)
{
    static char packet[8 * PACKET_MAX];  /* more than a line has */
    size_t size = (size_t)sprintf(packet, "%s ", kind);

    size += from_hex(text, packet + size);
    if (payload) {
        packet[size++] = '\0';
        size += from_hex(payload, packet + size);
    }
    if (send_packet(packet, size) == 0)
        puts("ok");
    else if (errno == EPIPE || errno == ECONNRESET)
        puts("closed");
    else
        printf("error %s\n", strerror(errno));
}

int main(int count, char **words)
{
    char *line = NULL;
    size_t size = 0;

    if (count != 2 || connect_to(words[1]) < 0) {
        fprintf(stderr, "client_adapter: cannot connect\n");
        return 1;
    }
    while (getline(&line, &size, stdin) > 0) {
        char *rest = strtok(line, "\n");
        char *word = strsep(&rest, " "), *text = strsep(&rest, " ");

        if (strcmp(word, "receive") == 0)
            answer_receive();
        else if (strcmp(word, "whoami") == 0)
            answer_whoami();
        else if (strcmp(word, "close") == 0)
            puts(shutdown(bus, SHUT_RDWR) == 0 ? "ok" : "closed");
        else if (strcmp(word, "publish") == 0)
            answer_command("MSG", text, rest);
        else
            answer_command(word[0] == 's' ? "SUB" : "UNSUB", text, NULL);
        fflush(stdout);
    }
    return 0;
}
